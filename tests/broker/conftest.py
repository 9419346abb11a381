"""A real broker for the tests of this folder, and helpers to wait without sleeping blindly."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.embedded import EmbeddedBroker
from broker.redis_client import connect
from common.messages import InstanceRecord, Role


@pytest.fixture(scope="module")
def broker_url() -> Iterator[str]:
    with EmbeddedBroker() as url:
        yield url


@pytest.fixture
async def redis(broker_url: str) -> AsyncIterator[Redis]:
    client = connect(broker_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 5.0) -> None:
    """Return once `condition()`, a function or a coroutine function, says True; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer is True or (inspect.isawaitable(answer) and await answer):
            return
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*coroutines: object) -> AsyncIterator[None]:
    """Run coroutines in the background for the length of the block."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_record(instance_id: str, role: Role = "encoder", epoch: int = 1, **changes: object) -> InstanceRecord:
    values: dict[str, object] = {
        "model": "signpost",
        "fingerprint": "f00d",
        "dtype": "float32",
        "http_address": "http://127.0.0.1:1",
        "requests_address": "tcp://127.0.0.1:2",
    }
    return InstanceRecord(instance_id=instance_id, role=role, epoch=epoch, **{**values, **changes})  # type: ignore[arg-type]
