"""A real broker for the tests of this folder, and helpers to wait without sleeping blindly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.cluster.embedded import EmbeddedBroker
from broker.cluster.redis_client import connect
from common.messages import InstanceRecord, Role
from tests.chaos.faulty_link import FaultyLink


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


@contextmanager
def stallable(broker_url: str) -> Iterator[tuple[FaultyLink, str]]:
    """A cable to the broker, and the URL of its near end."""
    address = urlsplit(broker_url)
    assert address.hostname is not None
    assert address.port is not None
    with FaultyLink((address.hostname, address.port)) as cable:
        yield cable, broker_url.replace(f":{address.port}", f":{cable.address[1]}")


def make_record(instance_id: str, role: Role = "encoder", epoch: int = 1, **changes: object) -> InstanceRecord:
    values: dict[str, object] = {
        "model": "signpost",
        "fingerprint": "f00d",
        "dtype": "float32",
        "http_address": "http://127.0.0.1:1",
        "requests_address": "tcp://127.0.0.1:2",
    }
    return InstanceRecord(instance_id=instance_id, role=role, epoch=epoch, **{**values, **changes})  # type: ignore[arg-type]
