"""The replicas: a worker process of ours under Ray's eyes, the proxy as Serve's ingress, and the broker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final, cast

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from starlette.types import Receive, Scope, Send

from broker.cluster.embedded import EmbeddedBroker
from common.config import Settings
from common.keys import bearer, cluster_token
from common.messages import Role
from common.model_info import load_model_info
from common.process.ports import reserve_port
from common.telemetry import setup_logging
from launch.cluster.children import Child
from launch.cluster.log_folders import LogFolder
from launch.cluster.plan import Plan
from launch.cluster.shares import runs_on_gpu
from launch.cluster.topology import LETTERS, Topology, parse_topology
from launch.ray.scaling import METRIC

BROKER: Final = "broker"
"""Name of the broker's deployment."""
_POLL_S: Final = 0.2
_ANSWER_S: Final = 10.0
_WORK: Final = f"triptych_{METRIC}"


def _node_address() -> str:
    return str(cast(Any, ray.util).get_node_ip_address())


class BrokerReplica:
    """The broker of one application, on the node where Ray puts it. Its end takes all messages with it.

    A new one has another address: workers and proxies of the old one are replaced by their health checks. Name a Redis
    of your own (`broker=redis://…`) where that is too much.
    """

    def __init__(self) -> None:
        self._server = EmbeddedBroker(host=_node_address())
        self._url = self._server.start()

    async def url(self) -> str:
        """Return the broker's URL, password included."""
        return self._url

    def check_health(self) -> None:
        """Raise RuntimeError once the server has ended."""
        if not self._server.running:
            raise RuntimeError(f"the broker has ended: {self._server.log_tail()}")

    def __del__(self) -> None:
        self._server.stop()


class WorkerReplica:
    """One worker process. The replica is up when the worker is ready, healthy while it is, and drains it at its end."""

    async def __init__(self, settings: Settings, topology: str, role: Role, broker: Any) -> None:  # type: ignore[misc]
        """Start the worker and wait until it is ready. Raises RuntimeError with its last words if it ends before."""
        self._broker = broker
        url = settings.broker if broker is None else await broker.url.remote()
        host = _node_address()
        self._logs = LogFolder()
        port = reserve_port(host, 0)
        self._settings = settings.model_copy(update={"broker": url, "host": host, "port": port})
        info = await asyncio.to_thread(load_model_info, self._settings.model, self._settings.lora_modules)
        # Fractions of a GPU are Ray's to give; cores and memory of a host are shared as if all workers were here.
        shared = Topology(**{role: 1}) if runs_on_gpu(self._settings.engine) else parse_topology(topology)
        name = f"{LETTERS[role]}-{serve.get_replica_context().replica_id.unique_id}"
        plan = Plan(self._settings, info, shared)
        instance = plan.instance(name, role, str(self._settings.broker), self._logs.path, plan.memory(), port)
        token = cluster_token(self._settings)
        headers = {"Authorization": bearer(token)} if token else {}
        self._http = httpx.AsyncClient(base_url=plan.base_url, headers=headers, timeout=_ANSWER_S, trust_env=False)
        self._child = await Child.start(instance.command)
        while not await self._answers("/ready"):
            self._check_running()
            await asyncio.sleep(_POLL_S)

    async def check_health(self) -> None:
        """Raise RuntimeError where the worker has ended, is not healthy, or belongs to a broker that is gone."""
        self._check_running()
        if not await self._answers("/health"):
            raise RuntimeError("the worker does not answer that it is healthy")
        if self._broker is not None and await self._broker.url.remote() != self._settings.broker:
            raise RuntimeError("the broker is another one now: this worker starts anew with it")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the seconds of work that this worker has before it, for the autoscaling policy."""
        try:
            answer = await self._http.get("/metrics")
            answer.raise_for_status()
        except httpx.HTTPError:
            return {}
        families = text_string_to_metric_families(answer.text)
        return {METRIC: sum(sample.value for family in families if family.name == _WORK for sample in family.samples)}

    async def __del__(self) -> None:
        """Drain the worker: it refuses what is new, and ends once everything under way is done."""
        child = self._child
        with contextlib.suppress(httpx.HTTPError):
            await self._http.post("/drain")
        try:
            await asyncio.wait_for(child.wait(), self._settings.request_timeout_s)
        except TimeoutError:
            child.kill()
            await child.wait()
        await self._http.aclose()
        self._logs.close(keep=False)

    def _check_running(self) -> None:
        if not self._child.running:
            raise RuntimeError(f"the worker has ended; its last words:\n{self._child.log_tail()}")

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._http.get(path)).is_success
        except httpx.HTTPError:
            return False


class LateProxy:
    """The proxy as an ASGI application, made once Serve starts it: only then is the broker's URL known."""

    def __init__(self, settings: Settings, own_broker: bool) -> None:
        self._settings, self._own_broker = settings, own_broker
        self._app: Any = None
        self._service: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            await self._make()
        await self._app(scope, receive, send)

    async def problem(self) -> str | None:
        """Return why this proxy should be replaced; None while it serves."""
        service = self._service
        if service is None or not hasattr(service, "pool"):
            return None
        if service.pool.failure is not None:
            return str(service.pool.failure)
        if self._own_broker and await self._broker_url() != service.settings.broker:
            return "the broker is another one now"
        return None

    async def _make(self) -> None:
        from proxy.app import make_app
        from proxy.service import Service

        context = serve.get_replica_context()
        url = await self._broker_url() if self._own_broker else self._settings.broker
        settings = self._settings.model_copy(update={"broker": url, "host": _node_address(), "port": 0})
        instance_id = f"proxy-{context.replica_id.unique_id}"
        setup_logging(settings.log_level, settings.log_format, instance_id)
        info = await asyncio.to_thread(load_model_info, settings.model, settings.lora_modules)
        self._service = Service(settings, info, instance_id)
        self._app = make_app(self._service, 0)

    async def _broker_url(self) -> str:
        handle = serve.get_deployment_handle(BROKER, app_name=serve.get_replica_context().app_name)
        return str(await handle.url.remote())


class ProxyReplica:
    """Serve's ingress; the application behind it is a LateProxy."""

    def __init__(self, *parts: Any) -> None:
        """`parts` are the other deployments of the application, bound here so that Serve runs them."""

    async def check_health(self) -> None:
        """Raise RuntimeError where this proxy cannot go on."""
        problem = await self.app.problem()  # type: ignore[attr-defined]
        if problem is not None:
            raise RuntimeError(problem)
