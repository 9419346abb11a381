"""The channels: in order, at least once, acknowledged, and sound over restarts of either end and of Redis."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError

from broker.cluster.embedded import EmbeddedBroker
from broker.cluster.redis_client import connect
from broker.handoff.channels import MAX_WAITING, ChannelReader, ChannelSender, Delivery
from common.messages import Grant, Receipt
from tests.broker.conftest import running, stallable
from tests.eventually import eventually


def grant(number: int) -> Grant:
    return Grant("r", number, 0, "granted")


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [delivery.message.input_id for delivery in deliveries]


async def test_messages_arrive_in_order_and_leave_an_empty_stream(redis: Redis) -> None:
    reader = ChannelReader(redis, "c", "e0", ("allocated", "injected"))
    sender = ChannelSender(redis, "c")
    received: list[Delivery] = []
    await reader.open()
    async with running(sender.run(), reader.run(received.append)):
        for number in range(200):
            sender.send("e0", "allocated", grant(number))
        sender.send("e0", "injected", Receipt("r", 0, 0, "stored"))
        await eventually(lambda: len(received) == 201)
        await eventually(lambda: has_length(redis, "c:e0:allocated", 0))
    assert numbers([d for d in received if isinstance(d.message, Grant)]) == list(range(200))
    assert not any(delivery.stale for delivery in received)
    await reader.delete()
    assert await redis.keys("*") == []


async def test_a_restarted_process_gets_what_its_former_self_did_not_acknowledge_marked_stale(redis: Redis) -> None:
    former = ChannelReader(redis, "c", "d0", ("metadata",))
    await former.open()
    sender = ChannelSender(redis, "c")
    async with running(sender.run()):
        sender.send("d0", "metadata", grant(0))
        await eventually(lambda: sender.num_waiting == 0)
        assert numbers(await _receive_some(former)) == [0]  # taken, not acknowledged: the process dies here
        sender.send("d0", "metadata", grant(1))  # and this one it never saw
        await eventually(lambda: has_length(redis, "c:d0:metadata", 2))
        reborn = ChannelReader(redis, "c", "d0", ("metadata",))
        await reborn.open()
        received: list[Delivery] = []
        async with running(reborn.run(received.append)):
            sender.send("d0", "metadata", grant(2))
            await eventually(lambda: len(received) == 3)
    assert numbers(received) == [0, 1, 2]
    assert [delivery.stale for delivery in received] == [True, True, False]


async def test_nothing_is_created_for_an_instance_that_is_not_there(redis: Redis) -> None:
    sender = ChannelSender(redis, "c", timeout_s=0.1)
    async with running(sender.run()):
        sender.send("nobody", "metadata", grant(0))
        await eventually(lambda: sender.num_dropped == 1)
    assert await redis.keys("*") == []


async def test_a_missing_receiver_does_not_hold_up_the_others(redis: Redis) -> None:
    reader, sender = ChannelReader(redis, "c", "d0", ("metadata",)), ChannelSender(redis, "c", timeout_s=30)
    await reader.open()
    received: list[Delivery] = []
    async with running(sender.run(), reader.run(received.append)):
        sender.send("nobody", "metadata", grant(0))
        sender.send("d0", "metadata", grant(1))
        await eventually(lambda: numbers(received) == [1], timeout_s=10.0)
        late = ChannelReader(redis, "c", "nobody", ("metadata",))
        await late.open()
        assert numbers(await _receive_some(late)) == [0]


async def test_unreadable_entries_are_counted_and_removed(redis: Redis) -> None:
    reader = ChannelReader(redis, "c", "d0", ("metadata",))
    await reader.open()
    await redis.xadd("c:d0:metadata", {"m": b"\xc1 not a message"})
    await redis.xadd("c:d0:metadata", {"other": b"field"})
    received: list[Delivery] = []

    async def is_empty() -> bool:
        return bool(await redis.xlen("c:d0:metadata") == 0)

    async with running(reader.run(received.append)):
        await eventually(lambda: reader.num_invalid == 2)
        await eventually(is_empty)
    assert received == []


async def test_what_waits_for_redis_is_bounded(redis: Redis) -> None:
    reader, sender = ChannelReader(redis, "c", "e0", ("allocated",)), ChannelSender(redis, "c", timeout_s=60.0)
    received: list[Delivery] = []
    await reader.open()
    for number in range(MAX_WAITING + 3):
        sender.send("e0", "allocated", grant(number))
    assert (sender.num_waiting, sender.num_dropped) == (MAX_WAITING, 3)
    async with running(sender.run(), reader.run(received.append)):
        await eventually(lambda: bool(received))
    assert numbers(received)[:1] == [3]


async def test_what_is_trimmed_of_a_stream_that_nobody_reads_is_counted(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.handoff.channels.MAX_ENTRIES", 200)
    reader, sender = ChannelReader(redis, "c", "e0", ("allocated",)), ChannelSender(redis, "c")
    received: list[Delivery] = []

    async def all_are_known_of() -> bool:
        return sender.num_trimmed + await redis.xlen("c:e0:allocated") == 450

    await reader.open()
    for number in range(450):
        sender.send("e0", "allocated", grant(number))
    async with running(sender.run()):
        await eventually(all_are_known_of)
    assert sender.num_trimmed >= 100  # Redis trims whole nodes of a stream
    async with running(reader.run(received.append)):
        await eventually(lambda: len(received) == 450 - sender.num_trimmed)
    assert numbers(received) == list(range(sender.num_trimmed, 450))


async def test_a_flush_is_survived(redis: Redis) -> None:
    reader, sender = ChannelReader(redis, "c", "d0", ("metadata",)), ChannelSender(redis, "c")
    await reader.open()
    received: list[Delivery] = []
    async with running(reader.run(received.append), sender.run()):
        sender.send("d0", "metadata", grant(0))
        await eventually(lambda: len(received) == 1)
        await redis.flushall()
        sender.send("d0", "metadata", grant(1))
        await eventually(lambda: len(received) == 2)
    assert not received[1].stale


async def test_a_restart_of_redis_is_survived() -> None:
    broker = EmbeddedBroker()
    url = await asyncio.to_thread(broker.start)
    client, reading = connect(url), connect(url, retries=0)
    reader, sender = ChannelReader(reading, "c", "d0", ("metadata",)), ChannelSender(client, "c", timeout_s=10)
    await reader.open()
    received: list[Delivery] = []
    async with running(reader.run(received.append), sender.run()):
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        await eventually(lambda: not broker.running)
        sender.send("d0", "metadata", grant(0))
        await asyncio.to_thread(broker.restart)
        await eventually(lambda: len(received) == 1, timeout_s=10)
    for connection in (client, reading):
        await connection.aclose()
    await asyncio.to_thread(broker.stop)


async def test_a_refusal_of_a_new_connection_is_no_end_of_sending(broker_url: str, redis: Redis) -> None:
    reader = ChannelReader(redis, "c", "d0", ("metadata",))
    await reader.open()
    refusals = [NoPermissionError("this user has no permissions to run the 'role' command")] * 2

    async def greet(connection: AbstractConnection) -> None:
        if refusals:
            raise refusals.pop()
        await connection.on_connect()

    client = connect(broker_url)
    client.connection_pool.connection_kwargs["redis_connect_func"] = greet
    sender = ChannelSender(client, "c")
    received: list[Delivery] = []
    async with running(reader.run(received.append), sender.run()):
        sender.send("d0", "metadata", grant(0))
        await eventually(lambda: numbers(received) == [0])
    assert not refusals
    await client.aclose()


async def test_a_server_that_stands_still_holds_a_message_up_for_no_longer_than_one_that_is_away(
    broker_url: str, redis: Redis
) -> None:
    reader = ChannelReader(redis, "c", "d0", ("metadata",))
    await reader.open()
    received: list[Delivery] = []
    with stallable(broker_url) as (cable, url):
        client = connect(url)
        sender = ChannelSender(client, "c", timeout_s=0.3)
        async with running(sender.run(), reader.run(received.append)):
            sender.send("d0", "metadata", grant(0))
            await eventually(lambda: numbers(received) == [0])
            cable.set("stall")
            for number in range(1, 200):  # more than a batch: none waits for those before it to be tried
                sender.send("d0", "metadata", grant(number))
            await eventually(lambda: sender.num_dropped >= 199, 10.0)  # 200 where the first one's reply was held up too
            cable.set("pass")
            sender.send("d0", "metadata", grant(200))
            await eventually(lambda: 200 in numbers(received))
        await client.aclose()
    assert sender.num_waiting == 0


async def test_a_reply_to_a_command_that_was_given_up_is_not_taken_for_another_ones(
    broker_url: str, redis: Redis
) -> None:
    await redis.mset({"one": "1", "two": "2"})
    with stallable(broker_url) as (cable, url):
        client = connect(url)
        assert await client.get("one") == b"1"
        cable.set("stall")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.get("one")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), client.pipeline(transaction=False) as pipe:
                    await pipe.get("one").get("one").execute()
        cable.set("pass")
        assert await asyncio.gather(client.get("two"), client.get("one"), client.get("two")) == [b"2", b"1", b"2"]
        await client.aclose()


async def has_length(redis: Redis, stream: str, length: int) -> bool:
    return int(await redis.xlen(stream)) == length


async def _receive_some(reader: ChannelReader) -> list[Delivery]:
    async with asyncio.timeout(5):
        while True:
            if deliveries := await reader._next():
                return deliveries
