"""A leading server, its replica, and three sentinels that watch over both: real processes on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError

from broker.cluster.embedded import find_server
from common.process.lifetime import tied_command
from common.process.ports import free_port

NAME = "mymaster"
PASSWORD = "wo/rd of servers"
SENTINEL_PASSWORD = "word of sentinels"
DOWN_AFTER_MS = 500
_SERVER = """\
bind 127.0.0.1
port {port}
dir {folder}
save ""
requirepass "{password}"
masterauth "{password}"
repl-diskless-sync-delay 0
"""
_SENTINEL = """\
bind 127.0.0.1
port {port}
dir {folder}
requirepass "{sentinel_password}"
sentinel sentinel-pass "{sentinel_password}"
sentinel monitor {name} 127.0.0.1 {leader} 2
sentinel auth-pass {name} "{password}"
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 3000
"""


@dataclass
class Group:
    """Two servers and their sentinels, by port."""

    servers: dict[int, subprocess.Popen[bytes]]
    sentinels: dict[int, subprocess.Popen[bytes]]

    @property
    def url(self) -> str:
        """The first sentinel named is none: the next is asked."""
        places = ",".join(f"127.0.0.1:{port}" for port in (1, *self.sentinels))
        secret = quote(SENTINEL_PASSWORD, safe="")
        return f"redis+sentinel://:{quote(PASSWORD, safe='')}@{places}/{NAME}?sentinel_password={secret}"

    @property
    def leader(self) -> int:
        """The port of the server that leads, by the sentinels' word; 0 while none answers."""
        for port in self.sentinels:
            with contextlib.suppress(RedisError), self.client(port) as sentinel:
                place = sentinel.sentinel_get_master_addr_by_name(NAME)
                return int(place[1]) if place else 0
        return 0

    def client(self, port: int) -> Redis:
        password = SENTINEL_PASSWORD if port in self.sentinels else PASSWORD
        return Redis(port=port, password=password, socket_timeout=5.0)

    def kill_leader(self) -> int:
        """SIGKILL the server that leads; return its port."""
        port = self.leader
        os.kill(self.servers[port].pid, signal.SIGKILL)
        return port

    def hand_over(self) -> None:
        """Let the sentinels make the replica lead, as before an upgrade, and the old leader follow.

        The sentinels' own order to follow comes some eight seconds later.
        """
        before = self.leader
        with self.client(next(iter(self.sentinels))) as sentinel:
            sentinel.execute_command("SENTINEL FAILOVER", NAME)
        _wait(lambda: self.leader not in (0, before))
        with self.client(before) as server:
            server.replicaof("127.0.0.1", self.leader)


@contextlib.contextmanager
def sentinel_group(folder: Path) -> Iterator[Group]:
    """Start the group; end it with the block."""
    leader, replica = (free_port("127.0.0.1") for _ in range(2))
    group = Group({}, {})
    try:
        for port in (leader, replica):
            text = _SERVER.format(port=port, folder=folder, password=PASSWORD)
            text += f"replicaof 127.0.0.1 {leader}\n" if port == replica else ""
            group.servers[port] = _start(folder, port, text)
            _wait(lambda port=port: group.client(port).ping())
        _wait(lambda: group.client(leader).info("replication")["connected_slaves"] == 1)
        for _ in range(3):
            port = free_port("127.0.0.1")
            words = {"port": port, "folder": folder, "leader": leader, "name": NAME, "down_after_ms": DOWN_AFTER_MS}
            text = _SENTINEL.format(**words, password=PASSWORD, sentinel_password=SENTINEL_PASSWORD)
            group.sentinels[port] = _start(folder, port, text, "--sentinel")
        for port in group.sentinels:
            _wait(lambda port=port: _knows_all(group, port))
        yield group
    finally:
        for process in (*group.servers.values(), *group.sentinels.values()):
            process.kill()
            process.wait()


def _start(folder: Path, port: int, text: str, *options: str) -> subprocess.Popen[bytes]:
    config = folder / f"{port}.conf"
    config.write_text(text)
    log = (folder / f"{port}.log").open("wb")
    with log:
        return subprocess.Popen(tied_command([find_server(), str(config), *options]), stdout=log, stderr=log)


def _knows_all(group: Group, port: int) -> bool:
    """Whether a sentinel knows the replica and the two other sentinels: only then can it make another server lead."""
    with group.client(port) as sentinel:
        state = sentinel.sentinel_master(NAME)
    return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)


def _wait(condition, timeout_s: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline_s, "the servers and sentinels did not come up in time"
        time.sleep(0.02)
