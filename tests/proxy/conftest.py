"""A real proxy on a real port, a real broker, and fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from broker.cluster.embedded import EmbeddedBroker
from broker.cluster.redis_client import connect
from common.config import Settings
from common.http.server import bind
from common.messages import WORKER_ROLES, Abort, Tokens
from common.model_info import ModelInfo, load_model_info
from proxy.app import ProxyServer, make_app
from proxy.dispatch.worker import Load
from proxy.service import Service
from tests import eventually as waiting
from tests.proxy.fake_cluster import FakeCluster, fake_cluster
from tests.proxy.models import make_listening_model, make_speech_model, make_text_model, make_translation_model

eventually = partial(waiting.eventually, timeout_s=8.0)


@dataclass
class ProxyHarness:
    """One proxy and its fake cluster."""

    service: Service
    cluster: FakeCluster
    base_url: str
    client: AsyncOpenAI
    http: httpx.AsyncClient
    server: ProxyServer

    @property
    def model(self) -> str:
        return self.service.model_name

    async def chat(self, content: Any = "What does the sign say?", **fields: Any) -> Any:
        fields.setdefault("model", self.model)
        return await self.client.chat.completions.create(messages=[{"role": "user", "content": content}], **fields)

    async def wait_for_workers(self) -> None:
        """Return once the proxy knows exactly the workers that are alive."""
        alive = {worker.id for worker in self.cluster.workers if worker.alive}
        await eventually(lambda: {one.instance_id for one in self.service.pool.workers(*WORKER_ROLES)} == alive)

    def read_one_by_one(self) -> None:
        """Let the decoders make a token once the proxy has read the one before, as if it never lagged behind."""

        async def read(tokens: Tokens) -> None:
            await eventually(lambda: self._has_read(tokens))

        for decoder in self.cluster.decoders:
            decoder.sent = read  # type: ignore[method-assign]

    def _has_read(self, tokens: Tokens) -> bool:
        runner = self.service.dispatcher.runners.get(tokens.request_id)
        return runner is None or len(runner._progress._sequences[tokens.index].token_ids) > tokens.offset

    def count(self, metric: str, **labels: str) -> float:
        """A metric of the proxy, without its prefix."""
        return self.service.metrics.registry.get_sample_value(f"triptych_proxy_{metric}", labels) or 0.0

    async def assert_clean(self) -> None:
        """Nothing is under way any more, here or on the fake workers, or is not in a moment."""
        with contextlib.suppress(AssertionError):  # what is left says more
            await eventually(lambda: not self._leftovers(), timeout_s=3.0)
        assert self._leftovers() == []

    def _leftovers(self) -> list[str]:
        service, pool = self.service, self.service.pool
        counts = {"running jobs": len(service.dispatcher.runners), "inflight": service.admission.inflight}
        counts["held bytes"] = service.admission.budget.held_bytes
        counts |= {f"{name} line": line.num_waiting for name, line in service.lines.items()}
        loads = [f"{one.instance_id}: {one.load}" for one in pool.workers(*WORKER_ROLES) if one.load != Load()]
        readers = [*self.cluster.prefills, *self.cluster.decoders]
        running = [f"{one.id} runs {list(one._running)}" for one in readers if one._running]
        return [*(f"{count} {name}" for name, count in counts.items() if count), *loads, *running]

    def aborted(self, request_id: str | None = None) -> set[str]:
        """Workers that were told to forget the request."""
        return {worker.id for worker in self.cluster.workers if worker.of(Abort, request_id)}


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    with EmbeddedBroker() as url:
        yield url


@pytest.fixture
async def redis(broker_url: str) -> AsyncIterator[Redis]:
    client = connect(broker_url)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(make_text_model(tmp_path_factory.mktemp("models") / "plain")))


@pytest.fixture(scope="session")
def long_text_model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(make_text_model(tmp_path_factory.mktemp("models") / "long", context=4096)))


@pytest.fixture(scope="session")
def whisper_model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(make_speech_model(tmp_path_factory.mktemp("models") / "tiny-whisper")))


@pytest.fixture(scope="session")
def translation_model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(make_translation_model(tmp_path_factory.mktemp("models") / "tiny-bart")))


@pytest.fixture(scope="session")
def listening_model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(make_listening_model(tmp_path_factory.mktemp("models") / "tiny-listener")))


@asynccontextmanager
async def serving(
    broker_url: str,
    redis: Redis,
    model: Path | str = "signpost",
    *,
    encoders: int = 1,
    decoders: int = 1,
    pairs: tuple[int, int] = (0, 0),
    **fields: Any,
) -> AsyncIterator[ProxyHarness]:
    """A proxy in this loop, ready, with so many fake workers; `decoders` prefill themselves, `pairs` are so many that
    prefill and so many that decode."""
    info = load_model_info(str(model), fields.get("lora_modules", ()))
    name = f"test-{uuid.uuid4().hex[:8]}"
    settings = Settings(model=str(model), broker=broker_url, cluster=name, port=0, **fields)
    async with fake_cluster(redis, info, name) as cluster:
        for _ in range(encoders):
            await cluster.add_encoder()
        for _ in range(decoders):
            await cluster.add_decoder()
        for _ in range(pairs[0]):
            await cluster.add_prefill()
        for _ in range(pairs[1]):
            await cluster.add_decoder("d")
        service = Service(settings, info, "proxy")
        async with running_proxy(service) as (base_url, server):
            client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=20)
            async with client, httpx.AsyncClient(base_url=base_url, timeout=20) as http:
                rig = ProxyHarness(service, cluster, base_url, client, http, server)
                await rig.wait_for_workers()
                yield rig
                await rig.assert_clean()
    assert await redis.keys(f"{name}*") == []


@asynccontextmanager
async def running_proxy(service: Service) -> AsyncIterator[tuple[str, ProxyServer]]:
    """The URL of a served application and its server; stopped and waited for at the end."""
    with bind("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 2**10)  # or the system holds megabytes unread
        port = listener.getsockname()[1]
        server = ProxyServer(make_app(service, port), service)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started or task.done())
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.stop()
            await task


@pytest.fixture
def serve(broker_url: str, redis: Redis) -> Callable[..., Any]:
    """`async with serve(model, encoders=..., **settings) as rig`"""
    return lambda *args, **fields: serving(broker_url, redis, *args, **fields)


@pytest.fixture
async def rig(serve: Callable[..., Any]) -> AsyncIterator[ProxyHarness]:
    """A proxy of the bundled model with an encoder and a decoder."""
    async with serve() as rig:
        yield rig


@pytest.fixture
async def speech_rig(serve: Callable[..., Any], whisper_model: ModelInfo) -> AsyncIterator[ProxyHarness]:
    """A proxy of a Whisper with an encoder and a decoder."""
    async with serve(whisper_model.folder) as rig:
        yield rig
