"""A cluster of processes, asked over HTTP as any client of OpenAI's API would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from common.config import EngineConfig, Settings, Transport
from common.errors import TriptychError
from common.keys import bearer, cluster_token
from common.model_info import ModelInfo
from launch.cluster.local_cluster import LocalCluster
from services.process.handoff_trace import hop_latencies
from tools.bench.client import LoadClient, Outcome, payload_of
from tools.bench.workloads import BenchRequest


class ClusterSystem:
    """Encoder, prefill-decode worker, proxy and broker, each a process, on this machine."""

    def __init__(
        self, info: ModelInfo, dtype: str, topology: str | None = None, *, transport: Transport = "auto", **engine: Any
    ) -> None:
        """Start the cluster. `engine` are further fields of EngineConfig."""
        settings = Settings(
            model=str(info.folder),
            port=0,
            log_level="warning",
            transport=transport,
            engine=EngineConfig.model_validate({"dtype": dtype, **engine}),
        )
        self.cluster = LocalCluster(settings, topology)
        self.name = f"cluster {self.cluster.supervisor.plan.topology}"
        self.cluster.start()
        self._runner = asyncio.Runner()  # one loop and one client for all batches: connections stay open
        self._client = LoadClient(self.cluster.base_url)

    def run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        """Answer all at once. Raise TriptychError("unavailable") where one is not answered."""
        requests = [self._client.build(*payload_of(request)) for request in batch]
        outcomes = self._runner.run(self._ask_all(requests))
        for outcome in outcomes:
            if outcome.status != 200:
                raise TriptychError("unavailable", f"the cluster answered {outcome.status}: {outcome.error}")
        return outcomes

    def hops(self, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
        """Return seconds of every hop of the handoffs of answered requests, by "moment -> moment"."""
        return hops_of(self.cluster, {outcome.request_id for outcome in outcomes})

    def close(self) -> None:
        try:
            self._runner.run(self._disconnect())
            self._runner.close()
        finally:
            self.cluster.stop()

    async def _ask_all(self, requests: Sequence[bytes]) -> list[Outcome]:
        return await asyncio.gather(*(self._client.ask(request) for request in requests))

    async def _disconnect(self) -> None:
        self._client.close()


def ask_workers(cluster: LocalCluster, path: str) -> dict[str, httpx.Response]:
    """Return the answer of each worker of a cluster at a path, by the worker's id."""
    token = cluster_token(cluster.supervisor.plan.settings)
    headers = {} if token is None else {"Authorization": bearer(token)}
    return {
        instance.id: httpx.get(f"{instance.http_address}{path}", headers=headers, trust_env=False).raise_for_status()
        for instance in cluster.instances.values()
        if instance.role != "proxy"
    }


def hops_of(cluster: LocalCluster, request_ids: set[str]) -> dict[str, list[float]]:
    """Return seconds of every hop of the handoffs of these requests, by "moment -> moment"."""
    entries = [answer.json() for answer in ask_workers(cluster, "/debug/handoffs").values()]
    return hop_latencies(
        [[entry for entry in side if entry["request_id"].partition(".")[0] in request_ids] for side in entries]
    )
