"""A cluster key, and contexts of members and strangers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq.asyncio

from broker.curve import ClusterContext
from common.keys import ClusterKey
from tests.proxy.conftest import broker_url, redis, serve, whisper_model

__all__ = ["broker_url", "redis", "serve", "whisper_model"]


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
