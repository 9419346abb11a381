"""A cluster key, contexts of members and strangers, and one whole cluster for what only a whole cluster shows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import zmq.asyncio
from openai.types.chat.chat_completion import Choice

from broker.cluster.curve import ClusterContext
from common.config import EngineConfig, Settings
from common.keys import ClusterKey
from launch.cluster.local_cluster import LocalCluster
from tests.proxy.conftest import broker_url, redis, serve, whisper_model
from tests.proxy.sample_media import image_part

__all__ = ["broker_url", "redis", "serve", "whisper_model"]

API_KEY = secrets.token_urlsafe(16)


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """A cluster as `triptych serve` alone starts one, but that it wants a key: its own broker, transports by choice."""
    engine = EngineConfig(max_model_len=512)  # answers without a limit of their own stay short
    settings = Settings(model="signpost", port=0, api_key=API_KEY, log_level="debug", engine=engine)
    with LocalCluster(settings, "1e1p1d") as cluster:
        yield cluster


def answer_about(cluster: LocalCluster, data: bytes, api_key: str, **options: Any) -> Choice:
    """Ask a cluster of the bundled model about a picture."""
    client = openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key=api_key, max_retries=0, timeout=120)
    content: Any = [image_part(data), {"type": "text", "text": "What does the sign say?"}]
    asked: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="signpost", messages=asked, **options).choices[0]


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
