"""A cluster key, contexts of members and strangers, and one whole cluster for what only a whole cluster shows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
import zmq.asyncio

from broker.cluster.curve import ClusterContext
from common.config import EngineConfig, Settings
from common.keys import ClusterKey
from launch.cluster.local_cluster import LocalCluster
from tests.proxy.conftest import broker_url, redis, serve, whisper_model

__all__ = ["broker_url", "redis", "serve", "whisper_model"]

API_KEY = secrets.token_urlsafe(16)


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """A cluster as `triptych serve` alone starts one, but that it wants a key: its own broker, transports by choice."""
    engine = EngineConfig(max_model_len=512)  # answers without a limit of their own stay short
    settings = Settings(model="signpost", port=0, api_key=API_KEY, log_level="debug", engine=engine)
    with LocalCluster(settings, "1e1p1d") as cluster:
        yield cluster


@pytest.fixture
def key() -> ClusterKey:
    return ClusterKey.generate()


@pytest.fixture
def make_context() -> Iterator[Callable[[ClusterKey | None], ClusterContext]]:
    """Contexts by key, all ended after the test."""
    contexts: list[zmq.asyncio.Context] = []

    def make(key: ClusterKey | None) -> ClusterContext:
        context = ClusterContext(key)
        contexts.append(context)
        return context

    yield make
    for context in contexts:
        context.destroy(linger=0)
