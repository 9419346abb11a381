"""A cell of real processes with several proxies, each of which can be killed and started again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.config import EngineConfig, Settings
from common.process.ports import reserve_port
from launch.cluster.configure import child_environment
from launch.cluster.local_cluster import LocalCluster
from tests.eventually import eventually

READY_S = 60.0


@dataclass
class Proxy:
    """A proxy process of a running cluster, beside the one of its supervisor."""

    cluster: LocalCluster
    name: str
    logs: Path
    port: int = field(default_factory=lambda: reserve_port("127.0.0.1", 0))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return once it is ready for requests."""
        plan = self.cluster.supervisor.plan
        changes = {"broker": self.cluster.broker_url, "instance_id": self.name, "port": self.port}
        command = [sys.executable, "-P", "-m", "triptych", "proxy"]
        with (self.logs / f"{self.name}.log").open("ab") as log:
            environment = child_environment(plan.settings.model_copy(update=changes), 1)
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        asyncio.run(eventually(lambda: is_ready(self.url), READY_S))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Cell:
    """A cluster and its proxies; the first is the supervisor's."""

    cluster: LocalCluster
    others: list[Proxy]

    @property
    def urls(self) -> list[str]:
        return [self.cluster.base_url, *(proxy.url for proxy in self.others)]

    def count(self, metric: str, **labels: str) -> float:
        """The sum of a metric over all processes of the cell."""
        lines = httpx.get(f"{self.urls[0]}/metrics/cluster", headers=self.headers, trust_env=False).text.splitlines()
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        found = [line for line in lines if line.partition("{")[0] == metric and all(one in line for one in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    @property
    def headers(self) -> dict[str, str]:
        keys = self.cluster.supervisor.plan.settings.api_key_file
        return {} if keys is None else {"authorization": f"Bearer {Path(keys).read_text().split()[0]}"}


@contextmanager
def cell(logs: Path, topology: str, *, proxies: int = 1, **fields: Any) -> Iterator[Cell]:
    """Run a cell of the bundled model with so many proxies, all ready."""
    settings = Settings(port=0, engine=EngineConfig(num_threads=1), **{"model": "signpost", **fields})
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(settings, topology))
        others = [Proxy(cluster, f"proxy-{number}", logs) for number in range(2, proxies + 1)]
        for proxy in others:
            stack.callback(proxy.kill)
            proxy.start()
        yield Cell(cluster, others)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).is_success
    except httpx.HTTPError:
        return False
