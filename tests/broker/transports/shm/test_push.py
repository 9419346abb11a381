"""Memory given over a connection before a tensor is made: written once, by the thread that makes it, and the receiver's
from then on. Whoever does not keep to that is dropped."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.transports.checksums import PIECE_BYTES
from broker.transports.linked import packets
from broker.transports.linked.wire import Announce
from broker.transports.received import PushedTensor, PushTarget
from broker.transports.shm import push_buffer, segment
from broker.transports.shm.push_buffer import PushBuffer
from broker.transports.shm.wire import PushOffer, PushWithdraw, Written
from broker.transports.tensors import TensorReceiver, TensorSender
from common.hashing import checksum
from common.messages import encode
from tests.broker.transports.transport_kit import (
    Kit,
    RawSender,
    fd_of,
    next_target,
    next_tensor,
    of_bytes,
    open_files,
    still_works,
    to,
    transfer,
)
from tests.eventually import eventually

MIB = 2**20


@dataclass
class Pair:
    """A sender and a receiver that know each other, and the memory that has been given."""

    sender: TensorSender
    receiver: TensorReceiver
    rooms: list[PushTarget] = field(default_factory=list)

    def give(self, num_bytes: int) -> PushBuffer | None:
        return self.sender.reserve_early(to(self.receiver.address), of_bytes(memoryview(bytes(num_bytes))))

    async def ready(self, num_bytes: int) -> PushBuffer:
        """A buffer whose memory has been touched on both sides."""
        given = self.give(num_bytes)
        assert isinstance(given, PushBuffer)
        self.rooms.append(await next_target(self.receiver))
        await eventually(lambda: given._state == "ready")
        await asyncio.to_thread(self.rooms[-1].touch)
        return given


@pytest.fixture
async def pair(kit: Kit) -> Pair:
    pair = Pair(kit.sender(), kit.receiver())
    await transfer(pair.sender, pair.receiver, of_bytes(b"x"), memoryview(b"x"))
    return pair


async def arrival(receiver: TensorReceiver) -> PushedTensor:
    async with asyncio.timeout(10):
        received = await next_tensor(receiver)
    assert isinstance(received, PushedTensor)
    return received


@pytest.mark.parametrize("num_bytes", [push_buffer.MIN_BYTES, PIECE_BYTES, 3 * PIECE_BYTES + 17, push_buffer.MAX_BYTES])
async def test_a_thread_sends_what_it_has_made_and_the_receiver_keeps_it_where_it_is(
    pair: Pair, num_bytes: int
) -> None:
    data = os.urandom(num_bytes)
    given = await pair.ready(num_bytes)
    memory = pair.rooms[0].memory
    await asyncio.to_thread(given.send, memoryview(data))
    assert given.sent_s is not None
    received = await arrival(pair.receiver)
    assert received.memory is memory
    assert received.data == data
    assert await received.verify() is None
    given.discard()
    received.release()
    assert received.memory.tobytes() == data  # nobody else has a use for it


async def test_it_overtakes_nothing_and_holds_nothing_up(pair: Pair) -> None:
    given = await pair.ready(MIB)
    other = memoryview(os.urandom(MIB))
    assert (await transfer(pair.sender, pair.receiver, of_bytes(other), other)).data == other
    given.send(memoryview(bytes(MIB)))
    assert (await arrival(pair.receiver)).data == bytes(MIB)


async def test_nothing_is_given_where_nothing_is_gained_or_nobody_is_connected(pair: Pair, kit: Kit) -> None:
    assert pair.give(push_buffer.MIN_BYTES - 1) is None
    assert pair.give(push_buffer.MAX_BYTES + 1) is None
    stranger = Pair(kit.sender(), pair.receiver)
    assert stranger.give(MIB) is None
    pair.sender.close()
    assert pair.give(MIB) is None


async def test_what_is_not_as_it_was_announced_is_not_sent(pair: Pair) -> None:
    given = await pair.ready(MIB)
    given.send(memoryview(bytes(MIB - 1)))
    assert given.sent_s is None
    given.discard()
    await eventually(lambda: pair.rooms[0].memory is None)


async def test_what_is_dropped_leaves_nothing_behind_and_makes_room_for_others(pair: Pair) -> None:
    files = open_files()
    for _ in range(3):
        given = [pair.give(MIB) for _ in range(push_buffer.MAX_PUSHES)]
        assert pair.give(MIB) is None
        for one in given:
            assert one is not None
            one.discard()
            one.discard()
    targets = [await next_target(pair.receiver) for _ in range(3 * push_buffer.MAX_PUSHES)]
    await eventually(lambda: all(target.memory is None for target in targets))
    assert pair.receiver.num_invalid == 0
    targets.clear()
    del given, one
    await eventually(lambda: open_files() <= files)


async def test_what_is_dropped_while_it_leaves_is_taken_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given = await pair.ready(2 * MIB)
    copying, dropped = threading.Event(), threading.Event()
    say = given._pushes.try_send

    def said(message: Written | Announce, fds: Sequence[int]) -> bool:
        copying.set()
        assert dropped.wait(10)
        return say(message, fds)

    monkeypatch.setattr(given._pushes, "try_send", said)
    sending = asyncio.create_task(asyncio.to_thread(given.send, memoryview(bytes(2 * MIB))))
    await asyncio.to_thread(copying.wait, 10)
    given.discard()
    dropped.set()
    await sending
    assert given.sent_s is None
    await eventually(lambda: pair.rooms[0].memory is None)
    assert pair.receiver._pop() is None


async def test_what_is_dropped_at_the_moment_it_begins_to_leave_is_taken_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await pair.ready(MIB)

    def time() -> float:
        given.discard()
        return 0.0

    monkeypatch.setattr(push_buffer.time, "time", time)
    given.send(memoryview(bytes(MIB)))
    assert given.sent_s is None
    await eventually(lambda: pair.rooms[0].memory is None)


async def test_a_system_without_memory_or_threads_is_no_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(push_buffer.segment, "create", fail)
        assert pair.give(MIB) is None
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
        assert pair.give(MIB) is None
    target = await next_target(pair.receiver)
    await eventually(lambda: target.memory is None)
    await pair.ready(MIB)


async def test_memory_that_the_receiver_cannot_map_is_none_and_the_tensor_is_found_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("too many mappings")

    with monkeypatch.context() as patch:
        patch.setattr(segment, "open_received", fail)
        given = await pair.ready(MIB)
    given.send(memoryview(bytes(MIB)))
    received = await next_tensor(pair.receiver)
    assert "there are 0" in str(received.fault)
    await pair.ready(MIB)


async def test_what_nobody_waits_for_is_told_of_without_its_bytes(pair: Pair) -> None:
    given = await pair.ready(MIB)
    pair.rooms[0].discard()
    given.send(memoryview(bytes(MIB)))
    received = await next_tensor(pair.receiver)
    assert received.header.size_bytes == MIB
    assert "there are 0" in str(received.fault)


async def test_a_finalizer_that_sends_while_something_is_sent_does_not_wait_for_itself(pair: Pair) -> None:
    """As the collector may run it: within a send of the same thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    end = packets.PacketSocket(ours, lambda packet, fds: None, lambda error: None)
    with end._open:
        assert end.try_send(b"from a finalizer")
    assert theirs.recv(100) == b"from a finalizer"
    end.close()
    theirs.close()


async def test_what_the_receiver_discards_does_not_arrive_whatever_the_sender_does(pair: Pair) -> None:
    given = await pair.ready(2 * MIB)
    pair.rooms[0].discard()
    await asyncio.to_thread(given.send, memoryview(bytes(2 * MIB)))
    assert "there are 0" in str((await next_tensor(pair.receiver)).fault)
    data = memoryview(b"the next one")
    assert (await transfer(pair.sender, pair.receiver, of_bytes(data), data)).data == data
    assert pair.receiver.num_invalid == 0


async def test_a_receiver_that_has_gone_is_no_error_for_the_thread(pair: Pair) -> None:
    given = await pair.ready(MIB)
    pair.receiver.close()
    await asyncio.to_thread(given.send, memoryview(bytes(MIB)))
    given.discard()
    await eventually(lambda: pair.give(MIB) is None)
    assert pair.rooms[0].memory is None


async def given_by(sender: RawSender, slot: int, data: bytes, *, fd: int | None = None) -> None:
    """A buffer that is written already."""
    fd = fd_of(data, size=len(data)) if fd is None else fd
    assert sender.socket.try_send(encode(PushOffer(slot, of_bytes(data))), [fd])
    packets.close_all([fd])


def announced(slot: int, data: bytes, **more: Any) -> bytes:
    return encode(Announce(slot, 0, len(data), of_bytes(data, **{"checksum": checksum(data), **more})))


@pytest.mark.parametrize("told", [(), (0,), (0, 1000, 1000, 5000)], ids=["at once", "begun", "in pieces"])
async def test_bytes_are_compared_with_their_checksum_however_they_were_told_of(kit: Kit, told: Sequence[int]) -> None:
    receiver, data = kit.receiver(), os.urandom(10_000)
    sender = await RawSender(receiver).greet()
    for slot, damaged in enumerate([False, True]):
        await given_by(sender, slot, data)
        for num_bytes in told:
            assert sender.socket.try_send(encode(Written(slot, num_bytes)))
        assert sender.socket.try_send(announced(slot, data, **({"checksum": 1} if damaged else {})))
        fault = await (await arrival(receiver)).verify()
        assert ("damaged" in str(fault)) if damaged else fault is None


async def test_a_sender_that_dies_takes_back_what_it_has_not_announced(kit: Kit) -> None:
    receiver, data = kit.receiver(), os.urandom(10_000)
    files = open_files()
    sender = await RawSender(receiver).greet()
    await given_by(sender, 0, data)
    await given_by(sender, 1, data)
    assert sender.socket.try_send(encode(Written(1, 5000)))
    assert sender.socket.try_send(announced(0, data))
    await next_target(receiver)
    second = await next_target(receiver)
    received = await arrival(receiver)
    sender.socket.close()
    await eventually(lambda: second.memory is None)
    assert await received.verify() is None  # what has arrived stays
    await eventually(lambda: open_files() <= files)


GIVEN = os.urandom(10_000)
FAULTS = {
    "more is written than there is": [encode(Written(0, 10_001))],
    "less is written than before": [encode(Written(0, 500)), encode(Written(0, 499))],
    "written to nothing": [encode(Written(1, 0))],
    "withdrawn twice": [encode(PushWithdraw(0)), encode(PushWithdraw(0))],
    "announced with another size": [announced(0, GIVEN[:-1])],
    "announced for another request": [announced(0, GIVEN, request_id="other")],
    "announced as another part": [announced(0, GIVEN, part=1)],
    "written after it was announced": [announced(0, GIVEN), encode(Written(0, 10_000))],
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_whoever_does_not_keep_to_what_was_given_is_dropped(kit: Kit, fault: str) -> None:
    receiver = kit.receiver()
    sender = await RawSender(receiver).greet()
    await given_by(sender, 0, GIVEN)
    *before, last = FAULTS[fault]
    for packet in before:
        assert sender.socket.try_send(packet)
    await sender.is_dropped_after(last)
    assert receiver.num_invalid == 1
    if "after it was announced" in fault:
        assert await (await arrival(receiver)).verify() is None
    await still_works(kit, receiver)


async def test_whoever_gives_what_cannot_be_is_dropped(kit: Kit) -> None:
    receiver = kit.receiver(max_bytes=MIB)
    give = encode(PushOffer(0, of_bytes(GIVEN)))
    await RawSender(receiver).is_dropped_after(give, fd_of(GIVEN, size=len(GIVEN)))  # before the greeting
    for packet, fds in [
        (give, []),
        (give, [fd_of(b"another size")]),
        (give, [fd_of(GIVEN, size=len(GIVEN)), fd_of(b"x")]),
        (encode(PushOffer(0, of_bytes(b""))), [fd_of(b"x")]),
        (encode(PushOffer(0, of_bytes(memoryview(bytes(MIB + 1))))), [fd_of(b"", size=MIB + 1)]),
    ]:
        sender = await RawSender(receiver).greet()
        await sender.is_dropped_after(packet, *fds)
    sender = await RawSender(receiver).greet()
    await given_by(sender, 0, GIVEN)
    await sender.is_dropped_after(give, fd_of(GIVEN, size=len(GIVEN)))
    sender = await RawSender(receiver).greet()
    for slot in range(push_buffer.MAX_PUSHES):
        await given_by(sender, slot, GIVEN)
    await sender.is_dropped_after(
        encode(PushOffer(push_buffer.MAX_PUSHES, of_bytes(GIVEN))), fd_of(GIVEN, size=len(GIVEN))
    )
    assert receiver.num_invalid == 8
    await still_works(kit, receiver)
