"""A broker and a proxy as users run them, and processes full of fake workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from broker.cluster.embedded import EmbeddedBroker
from common.config import Settings
from common.keys import ClusterKey
from common.process.ports import reserve_port
from launch.cluster.configure import child_environment
from tests.eventually import eventually
from tools.soak.memory import resident_bytes

MODEL: Final = "signpost"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class CrowdSettings(msgspec.Struct, frozen=True):
    """What one process of fake workers is told at its start."""

    number: int
    model: str
    broker: str
    cluster: str
    cluster_key: str


@dataclass(frozen=True)
class Usage:
    """What the proxy and the broker have taken so far, in CPU seconds by a clock in seconds; what they hold now."""

    time_s: float
    proxy_s: float
    broker_s: float
    proxy_bytes: int
    broker_bytes: int
    proxy_descriptors: int

    @classmethod
    def of(cls, proxy: int, broker: int) -> Usage:
        held = [resident_bytes(pid) or 0 for pid in (proxy, broker)]
        return cls(time.monotonic(), _cpu_s(proxy), _cpu_s(broker), *held, len(os.listdir(f"/proc/{proxy}/fd")))


class CrowdProcess:
    """A process of fake workers."""

    def __init__(self, fakes: CrowdSettings, log: Path) -> None:
        command = [sys.executable, "-m", "tests.churn.crowd", msgspec.json.encode(fakes).decode()]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_root()
            )

    def tell(self, **order: Any) -> None:
        """Give an order without waiting for the `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a process of fake workers has ended"
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Cell:
    """One proxy, its broker and its workers."""

    url: str
    proxy: subprocess.Popen[bytes]
    broker_pid: int
    crowds: list[CrowdProcess]
    fakes: CrowdSettings
    size: int = 0

    async def ready(self) -> None:
        """Return once the proxy answers."""

        def answers() -> bool:
            try:
                return self.in_use() == 0
            except httpx.TransportError:
                return False

        await eventually(answers, 60.0)

    async def grow(self, size: int) -> float:
        """Start workers until there are so many; return the seconds until the proxy uses them all."""
        began_s = time.monotonic()
        each, more = divmod(size - self.size, len(self.crowds))
        self.tell(*({"join": each + (number < more)} for number in range(len(self.crowds))))
        self.size = size
        await eventually(lambda: self.in_use() == size, 120.0)
        return time.monotonic() - began_s

    def tell(self, *orders: dict[str, Any]) -> list[dict[str, Any]]:
        """Give each process its order, or all the same; return their figures."""
        for number, crowd in enumerate(self.crowds):
            crowd.tell(**orders[number % len(orders)])
        return [crowd.answer() for crowd in self.crowds]

    def in_use(self) -> int:
        """Workers that the proxy would use."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text
        found = [line for line in text.splitlines() if line.startswith("triptych_proxy_workers{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in found)

    def usage(self) -> Usage:
        return Usage.of(self.proxy.pid, self.broker_pid)

    def events(self) -> tuple[Counter[str], list[str]]:
        """What has happened to the workers, and what they found wrong."""
        figures = self.tell({})
        return sum((Counter(one["events"]) for one in figures), Counter()), [w for one in figures for w in one["wrong"]]


@contextmanager
def cell(logs: Path, *, processes: int, **fields: Any) -> Iterator[Cell]:
    """Run an empty cell whose workers will be shared out among so many processes. Its proxy has a log in `logs`."""
    key = ClusterKey.generate().reveal()
    with ExitStack() as stack:
        broker = EmbeddedBroker()
        url = stack.enter_context(broker)
        port = reserve_port("127.0.0.1", 0)
        settings = Settings(model=MODEL, broker=url, cluster="churn", cluster_key=key, port=port, **fields)
        with (logs / "proxy.log").open("ab") as log:
            command = [sys.executable, "-P", "-m", "triptych", "proxy"]
            proxy = subprocess.Popen(command, env=child_environment(settings, 1), stdout=log, stderr=log, cwd=_root())
        stack.callback(proxy.communicate)
        stack.callback(proxy.terminate)
        crowds, fakes = [], CrowdSettings(0, MODEL, url, "churn", key)
        for number in range(processes):
            crowds.append(CrowdProcess(msgspec.structs.replace(fakes, number=number), logs / f"fakes-{number}.log"))
            stack.callback(crowds[-1].kill)
        assert broker._process is not None
        yield Cell(f"http://127.0.0.1:{port}", proxy, broker._process.pid, crowds, fakes)


def _root() -> Path:
    return Path(__file__).parents[2]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
