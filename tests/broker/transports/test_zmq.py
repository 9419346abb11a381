"""Tensors that go over ZMQ in several pieces: whole or not at all, whatever comes in the middle, and bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio
from redis.asyncio import Redis

from broker.cluster.curve import OVERHEAD_BYTES, ClusterContext
from broker.transports.base import QUEUE_TENSORS
from broker.transports.factory import TransportContext
from broker.transports.payload import ChunkedBytes
from broker.transports.received import ReceivedTensor
from broker.transports.tensors import TensorReceiver
from broker.transports.zmq import assembly as zmq_assembly
from broker.transports.zmq import transport as zmq_transport
from broker.transports.zmq import wire as zmq_wire
from broker.transports.zmq.assembly import TOTAL, Assembly
from broker.transports.zmq.transport import ZmqReceiver
from broker.transports.zmq.wire import PIECE_BYTES, WHOLE_BYTES, First, Head, Next, is_divided
from common.errors import TriptychError
from common.hashing import checksum
from common.keys import ClusterKey
from common.messages import encode
from services.handoff.kv_sender import PART_BYTES
from tests.broker.transports.relay import Relay
from tests.broker.transports.transport_kit import Kit, kit_of, of_bytes, receive, to, transfer
from tests.eventually import eventually

PIECE = 64 * 2**10
"""In these tests."""
DATA = memoryview(os.urandom(3 * PIECE + 5))
Message = tuple[Head, bytes | memoryview]


@pytest.fixture
async def kit(redis: Redis, broker_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    for module in (zmq_wire, zmq_assembly):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    async with kit_of("zmq", redis, broker_url) as kit:
        yield kit


def end_of(receiver: TensorReceiver) -> ZmqReceiver:
    (end,) = receiver._receivers
    assert isinstance(end, ZmqReceiver)
    return end


def messages_of(data: memoryview) -> list[Message]:
    """As a sender makes them."""
    messages: list[Message] = [(First(of_bytes(data), data.nbytes), data[:PIECE])]
    starts = range(PIECE, data.nbytes, PIECE)
    return messages + [(Next(start, checksum(data)), data[start : start + PIECE]) for start in starts]


async def send(socket: zmq.asyncio.Socket, messages: list[Message]) -> None:
    for head, data in messages:
        await socket.send_multipart([encode(head), data])


# --- whole


async def test_a_tensor_stays_in_the_pieces_in_which_it_comes(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    sending = asyncio.create_task(sender.send(to(receiver.address), of_bytes(DATA), DATA, 10))
    received = await receiver.receive()
    await sending
    assert received.header.checksum == checksum(DATA)
    assert isinstance(received.data, ChunkedBytes)
    assert [piece.nbytes for piece in received.data] == [PIECE] * 3 + [5]
    assert (received.fault, await received.verify()) == (None, None)
    target = memoryview(bytearray(DATA.nbytes))
    assert await received.copy_into(target) is None
    assert target == DATA
    assert received.data.joined() == DATA
    received.release()
    with pytest.raises(ValueError, match="released"):
        bytes(next(iter(received.data)))


async def test_small_ones_between_large_ones_keep_their_order(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    sizes = [10, 5 * PIECE, 20, PIECE, PIECE + 1, 30, 40 * PIECE, 2 * PIECE]
    sending = [
        asyncio.create_task(sender.send(to(receiver.address), of_bytes(bytes(size)), memoryview(bytes(size)), 20))
        for size in sizes
    ]
    async with asyncio.timeout(20):
        received = [await receive(receiver) for _ in sizes]
    await asyncio.gather(*sending)
    assert [tensor.fault for tensor in received] == [None] * len(sizes)
    assert sorted(tensor.data.nbytes for tensor in received) == sorted(sizes)
    assert end_of(receiver).num_invalid == 0


async def test_pieces_of_their_real_size_pass_encrypted(redis: Redis, broker_url: str) -> None:
    """What encryption adds does not make one too large."""
    kit = Kit("zmq", redis, broker_url, ClusterContext(ClusterKey.generate()))
    data = memoryview(os.urandom(2 * PIECE_BYTES + 1))
    received = await transfer(kit.sender(), kit.receiver(), of_bytes(data), data)
    assert (received.data, received.fault) == (data, None)
    await kit.close()


@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1], ids=["a part", "a larger token"])
async def test_keys_and_values_come_in_one_piece(kit: Kit, size: int) -> None:
    data = memoryview(os.urandom(size))
    sender, receiver = kit.sender(), kit.receiver()
    sending = asyncio.create_task(sender.send(to(receiver.address), of_bytes(data, table="self"), data, 10))
    async with asyncio.timeout(10):
        received = await receiver.receive()
    await sending
    assert isinstance(received.data, memoryview)
    assert await received.verify() is None
    assert received.data == data
    assert is_divided(received.header, size) == (size > PART_BYTES)


@pytest.mark.parametrize("place", [1000, 2 * PIECE, 3 * PIECE + 300], ids=["first", "middle", "last"])
async def test_damage_to_any_piece_is_found(kit: Kit, place: int) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    async with Relay(receiver.address, damaged=place) as wire:
        sending = asyncio.create_task(sender.send(to(wire.address), of_bytes(DATA), DATA, 10))
        async with asyncio.timeout(10):
            received = await receiver.receive()
        await sending
        assert isinstance(received.data, ChunkedBytes)
        for fault in (await received.verify(), await received.copy_into(memoryview(b""))):
            assert "damaged" in str(fault)


# --- not whole

FIRST, SECOND, THIRD, LAST = messages_of(DATA)
OTHER = First(of_bytes(DATA, request_id="other"), DATA.nbytes)
WRONG: dict[str, list[Message]] = {
    "no beginning": [SECOND],
    "one missing": [FIRST, THIRD],
    "one twice": [FIRST, SECOND, SECOND],
    "out of order": [FIRST, SECOND, LAST],
    "too short": [FIRST, (SECOND[0], SECOND[1][:-1])],
    "empty": [FIRST, (SECOND[0], b"")],
    "too long": [FIRST, SECOND, THIRD, (LAST[0], bytes(6))],
    "a short beginning": [(FIRST[0], FIRST[1][:-1])],
    "more than is taken": [(First(of_bytes(DATA), 2**20 + 1), FIRST[1])],
    "more than there can be": [(First(of_bytes(DATA), 2**62 - 1), FIRST[1])],
    "no more than a piece": [(First(of_bytes(DATA), PIECE), FIRST[1])],
    "nothing": [(First(of_bytes(DATA), 0), b"")],
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_does_not_go_on_where_it_has_ended_is_dropped_whole(kit: Kit, wrong: str) -> None:
    receiver = kit.receiver(max_bytes=2**20)
    raw = kit.raw(receiver)
    await send(raw, [*WRONG[wrong], *messages_of(DATA)])
    async with asyncio.timeout(10):
        received = await receive(receiver)
    assert (received.data, received.fault) == (DATA, None)
    assert end_of(receiver).num_invalid == 1
    assert (len(end_of(receiver)._assembly._partials), end_of(receiver)._assembly.num_bytes) == (0, 0)


async def test_what_is_no_message_amid_a_tensor_is_the_end_of_it(kit: Kit) -> None:
    receiver = kit.receiver()
    raw = kit.raw(receiver)
    for frames in ([b"junk", b"x"], [b"one frame"], [b"more", b"than", b"two"], [bytes(2**16 + 1), b"x"]):
        await send(raw, [FIRST, SECOND])
        await raw.send_multipart(frames)
        await send(raw, [THIRD])
    await send(raw, [(of_bytes(b"x"), b"x")])
    async with asyncio.timeout(10):
        assert (await receiver.receive()).data == b"x"
    assert end_of(receiver).num_invalid == 4
    assert end_of(receiver)._assembly.num_bytes == 0


WHOLE: Message = of_bytes(b"x", checksum=checksum(b"x")), b"x"


@pytest.mark.parametrize("next_one", [[WHOLE], messages_of(DATA)], ids=["small", "large"])
async def test_a_broken_tensor_counts_once_however_many_pieces_of_it_come(kit: Kit, next_one: list[Message]) -> None:
    receiver = kit.receiver()
    raw = kit.raw(receiver)
    for num_broken in (1, 2):
        await send(raw, [FIRST, THIRD, SECOND, THIRD, LAST, *next_one])
        async with asyncio.timeout(10):
            received = await receive(receiver)
        assert (received.header.size_bytes, received.fault) == (received.data.nbytes, None)
        assert end_of(receiver).num_invalid == num_broken
    assert (len(end_of(receiver)._assembly._broken), end_of(receiver)._assembly.num_bytes) == (0, 0)


async def test_of_no_more_senders_than_so_many_a_broken_tensor_is_remembered(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_assembly, "MAX_BROKEN", 10)
    assembly = Assembly(2**20, 30.0, lambda: True)
    for number in range(20):
        for _ in range(2):
            assembly.discard(b"%d" % number)
        assert len(assembly._broken) <= 10
    assert assembly.add(b"19", *SECOND) is None
    assert assembly.add(b"10", *SECOND) is None
    with pytest.raises(ValueError, match="not where the last one has ended"):
        assembly.add(b"9", *SECOND)
    assembly.close()


@pytest.mark.parametrize("nxt", [[(of_bytes(b"x"), b"x")], messages_of(DATA)], ids=["small", "large"])
async def test_another_tensor_is_the_end_of_one_that_was_given_up(kit: Kit, nxt: list[Message]) -> None:
    receiver = kit.receiver()
    raw = kit.raw(receiver)
    await send(raw, [(OTHER, FIRST[1]), SECOND, *nxt])
    async with asyncio.timeout(10):
        received = await receive(receiver)
    assert (received.header.request_id, received.header.size_bytes) == ("r", received.data.nbytes)
    assert end_of(receiver)._assembly.num_bytes == 0
    assert (receiver.num_unfinished, receiver.num_invalid) == (1, 0)


@pytest.mark.parametrize("end", ["times out", "is cancelled", "is closed"])
async def test_a_send_that_ends_amid_a_tensor_leaves_nothing_behind(kit: Kit, end: str) -> None:
    """Nobody takes anything: what may be on its way counts pieces, and so all of this tensor cannot be."""
    receiver = kit.receiver()
    connection = kit.connection(receiver.address)
    data = memoryview(bytes(1000 * PIECE))
    sending = asyncio.create_task(connection.send(of_bytes(data), data, 0.5 if end == "times out" else 60))
    if end == "times out":
        with pytest.raises(TriptychError, match="took none within"):
            await sending
    else:
        await eventually(lambda: connection._wakeup.is_set)
        if end == "is closed":
            connection.close()
            with pytest.raises(TriptychError, match="has gone"):
                await sending
            connection = kit.connection(receiver.address)
        else:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(connection.send(of_bytes(DATA), DATA, 20))
            received = await receive(receiver)
            assert (received.data, received.fault) == (DATA, None)
    assert end_of(receiver).num_invalid == 0
    assert end_of(receiver)._assembly.num_bytes == 0 or end == "is closed"  # which another connection does not tell


async def test_a_connection_that_breaks_amid_a_tensor_loses_it_and_nothing_else(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    data = memoryview(bytes(1000 * PIECE))
    async with Relay(receiver.address) as wire:
        receiving = asyncio.create_task(receive(receiver))
        sending = asyncio.create_task(sender.send(to(wire.address), of_bytes(data), data, 30))
        await eventually(lambda: end_of(receiver)._assembly.num_bytes > PIECE)
        wire.flowing.clear()
        wire.cut()
        wire.flowing.set()
        await sending  # on the next connection; its receipt will not come
        await sender.send(to(wire.address), of_bytes(DATA), DATA, 30)
        async with asyncio.timeout(20):
            received = await receiving
        assert wire.num_accepted == 2
    assert (received.data, received.fault) == (DATA, None)
    assert end_of(receiver).num_invalid == 1


# --- bounds


async def test_larger_messages_than_there_are_do_not_get_into_memory(kit: Kit) -> None:
    receiver, data = kit.receiver(), bytes(WHOLE_BYTES + OVERHEAD_BYTES + 1)
    with kit.raw(receiver) as raw, raw.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        await raw.send_multipart([encode(of_bytes(data)), data])
        async with asyncio.timeout(10):
            await monitor.recv_multipart()
        raw.disable_monitor()
    received = await transfer(kit.sender(), receiver, of_bytes(DATA), DATA)
    assert (received.data, received.fault) == (DATA, None)


async def test_memory_of_a_dead_sender_is_let_go_of_after_a_while(kit: Kit) -> None:
    receiver = TensorReceiver(TransportContext(kit.context, transport="zmq"), max_bytes=2**20, stale_s=0.3)
    receiving = asyncio.create_task(receiver.receive())
    with kit.raw(receiver) as raw:
        await send(raw, [FIRST, SECOND])
        await eventually(lambda: end_of(receiver)._assembly.num_bytes == 2 * PIECE)
    await eventually(lambda: end_of(receiver)._assembly.num_bytes == 0)
    await eventually(lambda: end_of(receiver)._assembly._timer is None)
    assert (receiver.num_unfinished, receiver.num_invalid) == (1, 0)
    await kit.sender().send(to(receiver.address), of_bytes(b"x"), memoryview(b"x"), 10)
    assert (await receiving).data == b"x"
    receiver.close()


async def test_what_waits_to_be_taken_is_not_stale(kit: Kit) -> None:
    idle = False
    assembly = Assembly(2**20, 0.0, lambda: idle)
    assembly.add(b"1", *FIRST)
    assembly._discard_stale()
    assert len(assembly._partials) == 1
    idle = True
    assembly._discard_stale()
    assert (len(assembly._partials), assembly.num_bytes) == (0, 0)
    assembly.close()


async def test_what_many_senders_have_begun_is_bounded_and_the_stalest_goes(kit: Kit) -> None:
    most = 4 * PIECE
    assembly = Assembly(most, 30.0, lambda: True)
    for number in range(20):
        for message in (FIRST, SECOND):
            assembly.add(b"%d" % number, *message)
        assert assembly.num_bytes <= TOTAL * most
    assert len(assembly._partials) == TOTAL * most // (2 * PIECE)
    assert assembly.add(b"0", *THIRD) is None  # what still comes of it is passed over
    assert assembly.num_bytes <= TOTAL * most
    assembly.add(b"19", *THIRD)
    whole = assembly.add(b"19", *LAST)
    assert isinstance(whole, ReceivedTensor)
    assert isinstance(whole.data, ChunkedBytes)
    assert whole.data.joined() == DATA
    assert assembly.num_unfinished == 19 - len(assembly._partials)
    assembly.close()


async def test_others_have_their_turns_while_a_large_one_comes(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_transport, "TURN_BYTES", 2 * PIECE)
    sender, receiver = kit.sender(), kit.receiver()
    end, steps = end_of(receiver), []
    original: Callable[[], ReceivedTensor | None] = end._next

    def counted() -> ReceivedTensor | None:
        before = end._assembly.num_bytes
        received = original()
        steps.append(end._assembly.num_bytes - before)
        return received

    monkeypatch.setattr(end, "_next", counted)
    data = memoryview(bytes((QUEUE_TENSORS - 1) * PIECE))
    assert (await transfer(sender, receiver, of_bytes(data), data)).fault is None
    assert max(steps) <= 2 * PIECE
