"""The one way to a Redis connection: what its deadlines and its repetitions promise."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from broker.cluster.redis_client import connect
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


async def test_a_broker_is_reached_by_the_address_of_its_host_that_answers(
    broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one drops what it gets."""
    loop, place = asyncio.get_running_loop(), urlsplit(broker_url)
    hole, answering = ("192.0.2.1", place.port), (place.hostname, place.port)
    connect_socket, tried = loop.sock_connect, list[object]()

    async def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (hole, answering)]

    async def connect_or_wait(sock: socket.socket, address: object) -> None:
        tried.append(address)
        await (asyncio.Event().wait() if address == hole else connect_socket(sock, address))

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr(loop, "sock_connect", connect_or_wait)
    client = connect(broker_url.replace(str(place.hostname), "broker.example"), retries=0)
    assert await client.ping()
    assert tried == [hole, answering]
    await client.aclose()
