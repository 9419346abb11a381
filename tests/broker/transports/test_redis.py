"""Tensors through the broker where replies of it are lost, or one side is, or what it held: what is sent twice comes
once, what is lost is sent again, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from broker.transports.received import ReceivedTensor
from broker.transports.redis import sender as redis_transport
from broker.transports.redis import wire as redis_wire
from broker.transports.redis.receiver import RedisReceiver
from broker.transports.redis.sender import RedisConnection
from broker.transports.redis.wire import CHUNK_BYTES, LEASE_S, WINDOW, Parcel
from broker.transports.tensors import TensorReceiver
from common.errors import TriptychError
from tests.broker.transports.transport_kit import Kit, kit_of, of_bytes, receive, to
from tests.eventually import eventually

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture
async def receiver(redis: Redis) -> AsyncIterator[RedisReceiver]:
    made = RedisReceiver(redis, "test", lambda _: None, max_bytes=2**28)
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


async def take(receiver: RedisReceiver) -> ReceivedTensor:
    """The next tensor."""
    received: list[ReceivedTensor] = []

    def has_come() -> bool:
        received.extend(filter(None, [receiver.pop()]))
        return bool(received)

    await eventually(has_come, 20.0)
    return received[0]


async def pass_on(sender: RedisConnection, receiver: RedisReceiver, data: memoryview) -> None:
    """Send a tensor and see that it comes as it was."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(sender.send(of_bytes(data), data, 20.0))
        receiving = group.create_task(take(receiver))
    received = receiving.result()
    assert (await received.verify(), received.data) == (None, data)


async def holds(redis: Redis, num_keys: int) -> None:
    """Return once the broker holds so many keys."""

    async def as_many() -> bool:
        return len(await redis.keys("*")) == num_keys

    await eventually(as_many)


def end_of(receiver: TensorReceiver) -> RedisReceiver:
    (end,) = receiver._receivers
    assert isinstance(end, RedisReceiver)
    return end


async def test_commands_that_are_carried_out_twice_change_nothing_and_leave_nothing(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection is lost between a command and its reply."""

    def twice(command: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def repeated(*args: Any) -> Any:
            await command(*args)
            return await command(*args)

        return repeated

    for name in ("announce", "ask", "push", "renew", "remove"):
        monkeypatch.setattr(Parcel, name, twice(getattr(Parcel, name)))
    sender = RedisConnection(redis, receiver.address)
    for size in (0, 1, CHUNK_BYTES, 6 * CHUNK_BYTES + 1):
        await pass_on(sender, receiver, memoryview(os.urandom(size)))
    await holds(redis, 0)
    assert (receiver.pop(), receiver.num_invalid, receiver.num_unfinished) == (None, 0, 0)


def lose(monkeypatch: pytest.MonkeyPatch, kind: type, *turns: int) -> list[int | str]:
    """Carry out all pushes of chunks (int) or of answers (str) but those whose turn it is to be lost, without a word.

    Return what was pushed, lost or not."""
    push, pushed = Parcel.push, list[int | str]()

    async def losing(parcel: Parcel, part: int | str, value: bytes) -> None:
        if isinstance(part, kind):
            pushed.append(part)
        if not isinstance(part, kind) or len(pushed) - 1 not in turns:
            await push(parcel, part, value)

    monkeypatch.setattr(Parcel, "push", losing)
    return pushed


@pytest.mark.parametrize("kind", [int, str], ids=["chunks", "answers"])
@pytest.mark.parametrize("turn", [0, 2, 5, 6], ids=["first", "amid", "last", "end"])
async def test_a_chunk_or_an_answer_that_is_lost_costs_a_moment_and_nothing_else(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch, kind: type, turn: int
) -> None:
    """As where it was in the reply to a command when the connection was lost. Of six chunks; the seventh answer is that
    all have come."""
    pushed = lose(monkeypatch, kind, turn)
    monkeypatch.setattr(redis_wire, "_BLOCK_S", 0.1)
    await pass_on(RedisConnection(redis, receiver.address), receiver, memoryview(os.urandom(6 * CHUNK_BYTES)))
    assert len(pushed) >= 6
    await holds(redis, 0)
    assert (receiver.pop(), receiver.num_invalid, receiver.num_unfinished) == (None, 0, 0)


async def test_a_refusal_that_is_lost_is_asked_for(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(monkeypatch, str, 0)
    receiver._max_bytes = 1
    with pytest.raises(TriptychError, match="refused a tensor of 2 bytes"):
        await RedisConnection(redis, receiver.address).send(of_bytes(b"xy"), memoryview(b"xy"), 20.0)
    await holds(redis, 0)


async def test_an_answer_that_is_none_ends_the_send(redis: Redis) -> None:
    sender = RedisConnection(redis, "redis+list://test:tensors:nobody")
    for answer in (b"2", b"-1", b"x", b"9" * 5000, b""):
        sending = asyncio.create_task(sender.send(of_bytes(b"x"), memoryview(b"x"), 30.0))
        _, announced = await redis.blpop(["test:tensors:nobody"], timeout=20)
        passing = redis_wire.decode_passing(announced)
        await redis.rpush(redis_wire.Parcel(redis, "test:tensors:nobody", passing).key("taken"), answer)
        with pytest.raises(TriptychError, match="the receiver of a tensor says"):
            await sending
    await holds(redis, 0)


def test_what_is_sent_again_is_what_has_not_arrived() -> None:
    chunks = redis_transport._Chunks(memoryview(bytes(9 * CHUNK_BYTES)))
    assert chunks.next() == [0, 1, 2, 3]
    chunks.note_waits_for(b"2")
    assert chunks.next() == [4, 5]
    chunks.note_waits_for(b"2")  # unasked: it was said twice
    assert chunks.next() == []
    chunks.asked = True
    chunks.note_waits_for(b"2")
    assert chunks.next() == [2]
    chunks.num_sent = chunks.waits_for
    chunks.note_waits_for(b"4")  # said before all was lost
    assert chunks.next() == [4, 5, 6, 7]
    chunks.asked = True
    chunks.note_waits_for(b"9")
    assert (chunks.next(), list(chunks.maybe_there)) == ([], [])
    with pytest.raises(TriptychError):
        chunks.note_waits_for(b"10")


async def test_what_was_given_up_is_removed_at_once_or_expires_where_the_broker_was_away(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = RedisConnection(redis, "redis+list://test:tensors:nobody")

    async def give_up() -> None:
        sending = asyncio.create_task(sender.send(of_bytes(b"x"), memoryview(b"x"), 30.0))
        await holds(redis, 3)  # the announcement, its lease, one chunk
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    async def is_away(*_: object) -> None:
        failed.set()
        raise RedisConnectionError("the connection was reset")

    with monkeypatch.context() as patch:
        patch.setattr(redis_wire, "_LEASE_MS", 3_600_000)  # it does not expire
        await give_up()
        await holds(redis, 0)
    failed = asyncio.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Parcel, "remove", is_away)
        await give_up()
        await failed.wait()
    assert {await redis.pttl(key) > 0 for key in await redis.keys("*")} == {True}
    await holds(redis, 0)


async def test_nothing_of_a_sender_that_is_killed_outlasts_its_lease(kit: Kit, redis: Redis) -> None:
    """However long it would have waited, and though the receiver has taken nothing, or is dead as well."""
    taking = await kit.peer("receive")
    address = await taking.line()
    taking.signal(signal.SIGSTOP)
    sending = await kit.peer("send", address, "64", "3600")

    async def is_amid() -> bool:
        return len(await redis.keys("*:[0-9]")) >= WINDOW - 1  # one may be in the hands of the one that is stopped

    await eventually(is_amid, 20.0)
    await sending.kill()
    left_ms = [await redis.pttl(key) for key in await redis.keys("*")]
    assert all(0 < left <= LEASE_S * 1000 or left == -2 for left in left_ms)
    await holds(redis, 0)


async def test_a_receiver_waits_for_a_slow_sender_and_lets_go_of_one_that_is_gone(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_wire, "_BLOCK_S", 0.1)
    receiver, slow = kit.receiver(), asyncio.Event()
    looks = 0

    async def counted(*args: Any) -> bool:
        nonlocal looks
        looks += 1
        return bool(await is_leased(*args))

    is_leased, push = Parcel.is_leased, Parcel.push

    async def held_up(parcel: Parcel, part: int | str, value: bytes) -> None:
        if isinstance(part, int):
            await slow.wait()
        await push(parcel, part, value)

    monkeypatch.setattr(Parcel, "is_leased", counted)
    monkeypatch.setattr(Parcel, "push", held_up)
    sending = asyncio.create_task(kit.sender().send(to(receiver.address), of_bytes(b"x"), memoryview(b"x"), 30.0))
    await eventually(lambda: looks > LEASE_S / 0.1 + 2, 20.0)
    slow.set()
    assert (await receive(receiver)).data == b"x"
    await sending
    victim = await kit.peer("send", receiver.address, "200", "3600")
    await eventually(lambda: len(end_of(receiver)._said) == 2, 20.0)  # the victim's has begun
    await victim.kill()
    await eventually(lambda: receiver.num_unfinished == 1, 30.0)
    await eventually(lambda: len(end_of(receiver)._tasks) == 1, 30.0)
    await holds(redis, 0)
    assert receiver.num_invalid == 0


async def test_a_sender_that_was_away_for_longer_than_its_lease_fails_at_once_when_it_is_back(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, back = asyncio.Event(), asyncio.Event()
    go_on: Any = RedisConnection._go_on
    renew = Parcel.renew

    async def stopped(*args: Any) -> Any:
        away.set()
        await back.wait()
        return await go_on(*args)

    async def renewed(*args: Any) -> bool:
        await back.wait()
        return bool(await renew(*args))

    monkeypatch.setattr(RedisConnection, "_go_on", stopped)
    monkeypatch.setattr(Parcel, "renew", renewed)
    data = memoryview(bytes(64 * MIB))
    sending = asyncio.create_task(RedisConnection(redis, receiver.address).send(of_bytes(data), data, 3600.0))
    async with asyncio.timeout(30):
        await away.wait()
        await eventually(lambda: receiver.num_unfinished == 1, 20.0)
        await holds(redis, 0)
        back.set()
        with pytest.raises(TriptychError) as caught:
            await sending
    assert caught.value.info.code == "unavailable"
    await holds(redis, 0)
    assert (receiver.pop(), receiver.num_invalid) == (None, 0)


@pytest.mark.parametrize("receiving", [False, True], ids=["before the receiver looks", "amid"])
async def test_a_broker_that_was_emptied_costs_a_moment(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch, receiving: bool
) -> None:
    """As one does that stands still for so long that leases end. Nothing that has arrived is sent again."""
    monkeypatch.setattr(redis_wire, "_BLOCK_S", 0.5)  # as ever longer than what a sender takes to renew its lease
    held, over, push = asyncio.Event(), asyncio.Event(), Parcel.push
    hear: Any = RedisReceiver._handle
    pushed: list[int] = []

    async def counted(parcel: Parcel, part: int | str, value: bytes) -> None:
        if isinstance(part, int):
            pushed.append(part)
        if receiving and part == 6:
            held.set()
            await over.wait()
        await push(parcel, part, value)

    monkeypatch.setattr(Parcel, "push", counted)
    if not receiving:
        monkeypatch.setattr(RedisReceiver, "_handle", lambda *_: held.set())
    data = memoryview(os.urandom(8 * CHUNK_BYTES))
    passing = asyncio.create_task(pass_on(RedisConnection(redis, receiver.address), receiver, data))
    async with asyncio.timeout(20):
        await held.wait()
        await eventually(lambda: len(pushed) >= WINDOW)
        monkeypatch.setattr(RedisReceiver, "_handle", hear)
        await redis.flushall()
        over.set()
        await passing
    num_sent = pushed.count(0)
    assert num_sent == 1 if receiving else num_sent >= 2
    assert (receiver.num_invalid, receiver.num_unfinished) == (0, 0)
    await holds(redis, 0)


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


async def test_many_slow_senders_take_no_connection_from_anybody_else(
    redis: Redis, receiver: RedisReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor that has begun waits for its next chunk over a connection of its own."""
    monkeypatch.setattr(redis_wire, "_LEASE_MS", 60_000)
    own, count = receiver.address.partition("://")[2], 120
    header = of_bytes(b"x")
    passing = [redis_wire.Passing(f"{number:016x}", 1, 30.0, header) for number in range(count)]
    slow = [redis_wire.Parcel(redis, own, one) for one in passing]
    for parcel in slow:
        await parcel.announce()
    await eventually(lambda: len(receiver._tasks) == count + 1)
    assert await redis.set("heartbeat", 1)
    assert await redis.delete("heartbeat")
    for parcel in slow:
        await parcel.push(0, b"x")
    for _ in slow:
        await take(receiver)
    assert (receiver.num_invalid, receiver.num_unfinished) == (0, 0)
    for parcel in slow:
        await parcel.remove(())
