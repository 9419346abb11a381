"""Tensors through the broker where the connection to it is lost, or one side is: what is sent twice comes once, and
nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from broker import presence
from broker.presence import Life
from broker.tensors import TensorReceiver
from broker.transports import redis_leftovers, redis_receiver, redis_transport
from broker.transports.base import ReceivedTensor
from broker.transports.redis_receiver import RedisReceiver
from broker.transports.redis_transport import RedisConnection
from broker.transports.redis_wire import CHUNK_BYTES, WINDOW, Passing, announce, answers_key, index_key, list_of, push
from common.errors import TriptychError
from common.messages import encode
from tests.broker.conftest import make_record
from tests.broker.transport_kit import Kit, kit_of, of_bytes, receive, to
from tests.eventually import eventually

MIB = 2**20
THERE = make_record("peer", epoch=0)
"""The sender of tests.broker.transport_peer."""
ANEW = make_record("peer", epoch=1)


@pytest.fixture
async def receiver(redis: Redis) -> AsyncIterator[RedisReceiver]:
    made = RedisReceiver(redis, "test", lambda: None, max_bytes=2**28)
    yield made
    made.close()


@pytest.fixture
async def kit(redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    async with kit_of("redis", redis, f"{broker_url}?client_name=peer") as kit:
        yield kit


class Pause:
    """Before the receiver's next answer of a kind, and all that follow: `reached` there, they go on with `over`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
        self.reached, self.over = asyncio.Event(), asyncio.Event()
        answer: Any = RedisReceiver._answer

        async def paused(receiver: RedisReceiver, passing: Any, what: bytes) -> None:
            if what == kind:
                self.reached.set()
                await self.over.wait()
            await answer(receiver, passing, what)

        monkeypatch.setattr(RedisReceiver, "_answer", paused)

    async def wait(self) -> None:
        async with asyncio.timeout(30):
            await self.reached.wait()


async def test_commands_that_are_carried_out_twice_change_nothing_and_leave_nothing(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection is lost between a command and its reply."""

    def twice(command: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def repeated(*args: Any) -> None:
            await command(*args)
            await command(*args)

        return repeated

    for module, name in ((redis_transport, "announce"), (redis_transport, "push"), (redis_receiver, "push")):
        monkeypatch.setattr(module, name, twice(getattr(module, name)))
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
    assert len(await redis.keys("test:*")) == 3
    answers = keys[0].removesuffix(b"0") + b"taken"

    async def is_empty() -> bool:
        return await redis.keys("test:*") == []

    await eventually(is_empty)
    for _ in range(3):
        await redis.rpush(answers, b"taken")  # the receiver had it in hand, and was stopped for a while
        await eventually(is_empty)


def end_of(receiver: TensorReceiver) -> RedisReceiver:
    (end,) = receiver._receivers
    assert isinstance(end, RedisReceiver)
    return end


async def holds(redis: Redis, num_keys: int) -> None:
    """Return once the broker holds so many keys."""

    async def as_many() -> bool:
        return len(await redis.keys("*")) == num_keys

    await eventually(as_many)


async def test_a_receiver_waits_for_a_sender_that_is_there_and_not_for_one_that_is_gone(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, pause = kit.receiver(), Pause(monkeypatch, b"taken")
    victim = await kit.peer("send", receiver.address, "64", "30")
    await pause.wait()
    await victim.kill()
    pause.over.set()
    await eventually(lambda: len(end_of(receiver)._tasks) == 2)
    await holds(redis, 2)  # it has taken all chunks that were there, and has answered; the tensor is under way
    monkeypatch.setattr(presence, "ABSENCE_S", 1e9)
    for senders in ([THERE], [make_record("another")], []):  # who is not seen may have come just now
        receiver.keep_only(senders)
        assert receiver.num_unfinished == 0
    receiver.keep_only([ANEW])
    assert receiver.num_unfinished == 1
    await holds(redis, 0)
    await eventually(lambda: len(end_of(receiver)._tasks) == 1)
    assert receiver.num_invalid == 0


async def test_a_sender_that_is_seen_no_more_is_gone(kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, pause = kit.receiver(), Pause(monkeypatch, b"taken")
    victim = await kit.peer("send", receiver.address, "64", "30")
    await pause.wait()
    await victim.kill()
    pause.over.set()
    monkeypatch.setattr(presence, "ABSENCE_S", -1.0)
    receiver.keep_only([THERE])
    assert receiver.num_unfinished == 0
    receiver.keep_only([make_record("another")])
    assert receiver.num_unfinished == 1
    await holds(redis, 0)


@pytest.mark.parametrize(("answer", "max_bytes"), [(b"done", 2**28), (b"refused", MIB)])
async def test_an_answer_waits_for_a_sender_that_is_there_and_is_removed_where_it_is_gone(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch, answer: bytes, max_bytes: int
) -> None:
    receiver, pause = kit.receiver(max_bytes), Pause(monkeypatch, answer)
    victim = await kit.peer("send", receiver.address, "4", "30")
    await pause.wait()
    await victim.kill()

    async def is_noticed() -> bool:
        return not [client for client in await redis.client_list() if client["name"] == "peer"]

    await eventually(is_noticed)  # or the broker would give the answer to the dead
    pause.over.set()
    await eventually(lambda: len(end_of(receiver)._tasks) == 1)
    num_keys = len(await redis.keys("*"))
    assert num_keys > 0
    receiver.keep_only([THERE])
    assert len(await redis.keys("*")) == num_keys
    receiver.keep_only([ANEW])
    await holds(redis, 0)
    assert receiver.num_unfinished == 0


async def test_a_sender_that_was_stopped_gets_its_answer_as_long_as_it_is_there(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, pause = kit.receiver(), Pause(monkeypatch, b"done")
    slow = await kit.peer("send", receiver.address, "4", "30")
    await pause.wait()
    slow.signal(signal.SIGSTOP)
    pause.over.set()
    await eventually(lambda: len(end_of(receiver)._tasks) == 1)
    receiver.keep_only([THERE])
    slow.signal(signal.SIGCONT)
    assert await slow.line() == "sent"


async def test_a_sender_that_comes_back_after_it_was_given_up_fails_by_its_deadline_and_nothing_is_left(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Any = RedisConnection._answer
    away, back = asyncio.Event(), asyncio.Event()

    async def stopped(*args: Any) -> bytes:
        away.set()
        await back.wait()
        taken: bytes = await answer(*args)
        return taken

    monkeypatch.setattr(RedisConnection, "_answer", stopped)
    monkeypatch.setattr(presence, "ABSENCE_S", -1.0)
    data = memoryview(bytes(64 * MIB))
    sending = asyncio.create_task(RedisConnection(redis, receiver.address).send(of_bytes(data), data, 3.0))
    async with asyncio.timeout(30):
        await away.wait()
        receiver.keep_only([])
        await holds(redis, 0)
        back.set()
        with pytest.raises(TriptychError) as caught:
            await sending
    assert caught.value.info.code == "unavailable"
    await holds(redis, 0)
    assert (receiver.take(), receiver.num_unfinished, receiver.num_invalid) == (None, 1, 0)


async def test_a_sender_whose_receiver_is_gone_gives_up_at_once_and_removes_what_is_left(
    kit: Kit, redis: Redis
) -> None:
    peer, sender = await kit.peer("receive"), kit.sender()
    address = await peer.line()
    await sender.send(to(address), of_bytes(b"x"), memoryview(b"x"), timeout_s=30)
    assert await peer.line() == "ok"
    await holds(redis, 0)
    peer.signal(signal.SIGSTOP)
    data = memoryview(bytes(32 * MIB))
    sending = [asyncio.create_task(sender.send(to(address), of_bytes(data), data, timeout_s=300)) for _ in range(2)]

    async def waits() -> bool:
        return len(await redis.keys("*:[0-9]")) >= WINDOW - 1  # one may be in the hands of the dead

    await eventually(waits)
    await peer.kill()
    sender.keep_only([])
    async with asyncio.timeout(10):
        errors = await asyncio.gather(*sending, return_exceptions=True)
    assert [error.info.code for error in errors if isinstance(error, TriptychError)] == ["unavailable"] * 2
    await holds(redis, 0)
    receiver = kit.receiver()
    again = asyncio.create_task(receive(receiver))
    await sender.send(to(receiver.address), of_bytes(b"y"), memoryview(b"y"), timeout_s=30)
    assert (await again).data == b"y"


async def test_what_both_ends_leave_when_they_die_amid_a_tensor_another_receiver_removes(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking, survivor = await kit.peer("receive"), kit.receiver()
    address = await taking.line()
    taking.signal(signal.SIGSTOP)
    sending = await kit.peer("send", address, "64", "30")

    async def is_amid() -> bool:
        return len(await redis.keys("*:[0-9]")) >= WINDOW - 1  # one may be in the hands of the dead

    await eventually(is_amid, 20.0)
    await sending.kill()
    await taking.kill()
    num_keys = len(await redis.keys("*"))
    survivor.keep_only([])  # hears of it now, and cannot know yet whether they will be back
    await looked(survivor)
    assert len(await redis.keys("*")) == num_keys
    monkeypatch.setattr(presence, "ABSENCE_S", -1.0)
    survivor.keep_only([])
    await holds(redis, 0)


async def looked(receiver: TensorReceiver) -> None:
    """Return once it has gone through the tensors under way."""
    looking = end_of(receiver)._orphans._looking
    assert looking is not None
    await looking


ENDS = {"there": make_record("x", epoch=5), "anew": make_record("x", epoch=6), "not seen": None}


@pytest.mark.parametrize("known_for_long", [False, True])
@pytest.mark.parametrize("receiver", [*ENDS, "us"])
@pytest.mark.parametrize("sender", ENDS)
async def test_a_tensor_under_way_is_removed_where_its_sender_is_gone_and_its_receiver_is_gone_or_ourselves(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch, sender: str, receiver: str, known_for_long: bool
) -> None:
    """The living remove what is theirs, and who is not seen may have come just now."""
    monkeypatch.setattr(presence, "ABSENCE_S", -1.0 if known_for_long else 1e9)
    us = kit.receiver()
    key = us.address.partition("://")[2] if receiver == "us" else list_of("triptych", Life("receiver", 5))
    there = [
        make_record(name, epoch=found.epoch)
        for name, state in (("sender", sender), ("receiver", receiver))
        if (found := ENDS.get(state)) is not None
    ]
    passing = Passing("0f" * 8, 2, 30.0, of_bytes(b"xy", sender="sender"), 5, key)
    await announce(redis, passing, 30.0)
    if receiver == "us":
        await eventually(lambda: len(end_of(us)._tasks) == 2)  # it waits for the first chunk
    await push(redis, answers_key(key, passing), b"taken", passing)
    us.keep_only(there)
    await looked(us)
    gone = {"there": False, "anew": True, "not seen": known_for_long, "us": True}
    num_keys = 2 if receiver == "us" else 3
    assert len(await redis.keys("*")) == (0 if gone[sender] and gone[receiver] else num_keys)
    await redis.delete(*await redis.keys("*"), "none")


async def test_entries_that_nobody_can_have_made_are_dropped_and_those_that_have_expired(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = kit.receiver()
    foreign = Passing("0f" * 8, 2**61, 30.0, of_bytes(b"xy", sender="sender"), 5, "another:tensors:receiver:5:0f0f")
    await redis.set(answers_key(foreign.receiver, foreign), "theirs")
    expired = msgspec.structs.replace(foreign, receiver=list_of("triptych", Life("receiver", 5)), timeout_s=0.0)
    nameless = msgspec.structs.replace(foreign, receiver="triptych:tensors:nobody")
    await redis.sadd(index_key("triptych"), b"junk", *map(encode, (foreign, expired, nameless)))
    monkeypatch.setattr(redis_leftovers, "GRACE_S", -1.0)
    us.keep_only([make_record("sender", epoch=5)])
    await looked(us)
    assert await redis.keys("*") == [answers_key(foreign.receiver, foreign).encode()]
