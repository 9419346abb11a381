"""Tensors through the broker where the connection to it is lost: what is sent twice comes once, and nothing is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from broker.transports import redis_transport
from broker.transports.base import ReceivedTensor
from broker.transports.redis_transport import CHUNK_BYTES, RedisConnection, RedisReceiver
from tests.broker.transport_kit import of_bytes
from tests.eventually import eventually


@pytest.fixture
async def receiver(redis: Redis) -> AsyncIterator[RedisReceiver]:
    made = RedisReceiver(redis, "test", lambda: None, max_bytes=2**28)
    yield made
    made.close()


async def test_commands_that_are_carried_out_twice_change_nothing_and_leave_nothing(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection is lost between a command and its reply."""
    push = redis_transport._push

    async def twice(redis: Redis, key: str, value: bytes | memoryview, expires_s: float) -> None:
        await push(redis, key, value, expires_s)
        await push(redis, key, value, expires_s)

    monkeypatch.setattr(redis_transport, "_push", twice)
    sender = RedisConnection(redis, receiver.address)
    for size in (0, 1, CHUNK_BYTES, 6 * CHUNK_BYTES + 1):
        data = memoryview(os.urandom(size))
        received: list[ReceivedTensor] = []

        def has_come(received: list[ReceivedTensor] = received) -> bool:
            received += [one] if (one := receiver.take()) is not None else []
            return bool(received)

        async with asyncio.timeout(30):
            await asyncio.gather(sender.send(of_bytes(data), data, 20.0), eventually(has_come, 20.0))
        assert (await received[0].verify(), received[0].data) == (None, data)

    async def is_empty() -> bool:
        return await redis.keys("test:*") == []

    await eventually(is_empty)
    assert receiver.take() is None
    assert (receiver.num_invalid, receiver.num_unfinished) == (0, 0)


async def test_what_a_tensor_has_left_that_was_given_up_is_removed_once_the_broker_is_back(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = RedisConnection(redis, "redis+list://test:tensors:nobody")
    sending = asyncio.create_task(sender.send(of_bytes(b"x"), memoryview(b"x"), 30.0))
    keys: list[bytes] = []

    async def has_sent() -> bool:
        keys[:] = await redis.keys("test:*:0")
        return bool(keys)

    def lost(*_: object, **__: object) -> None:
        raise RedisConnectionError("the connection was reset")

    await eventually(has_sent)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(Redis, "pipeline", lost)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await eventually(lambda: [line for line in logs if "cannot be removed yet" in line["event"]] != [])
    assert len(await redis.keys("test:*")) == 2
    answers = keys[0].removesuffix(b"0") + b"taken"

    async def is_empty() -> bool:
        return await redis.keys("test:*") == []

    await eventually(is_empty)
    await redis.rpush(answers, b"taken")  # the receiver had it in hand
    await eventually(is_empty)
