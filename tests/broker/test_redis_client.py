"""The one way to a Redis connection: what its deadlines and its repetitions promise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from broker.redis_client import connect
from tests.broker.conftest import stallable


@pytest.mark.parametrize("error", [None, ConnectionResetError()], ids=["written", "failed"])
async def test_a_command_is_given_up_though_its_cancellation_comes_just_when_writing_has_ended(
    broker_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    await redis.mset({"asked": "1", "asked later": "2"})
    with stallable(broker_url) as (cable, url):
        client = connect(url)
        assert await client.ping()
        write = AbstractConnection._send_packed_command

        async def write_then_cancel(self: AbstractConnection, command: Iterable[bytes]) -> None:
            await write(self, command)
            asking.cancel()
            if error is not None:
                raise error

        monkeypatch.setattr(AbstractConnection, "_send_packed_command", write_then_cancel)
        cable.set("stall")
        asking = asyncio.create_task(client.get("asked"))
        await asyncio.wait({asking}, timeout=3.0)
        assert asking.cancelled()
        monkeypatch.setattr(AbstractConnection, "_send_packed_command", write)
        cable.set("pass")
        assert await client.get("asked later") == b"2"
        await client.aclose()
