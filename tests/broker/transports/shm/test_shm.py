"""Shared memory: read in place, room given back by release or by the last view's end, bounded, nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from broker.transports.arena import ALIGNMENT_BYTES, Arena
from broker.transports.base import QUEUE_TENSORS
from broker.transports.linked import packets
from broker.transports.linked.wire import Release, for_sender
from broker.transports.shm import sender as shm_transport
from broker.transports.tensors import ReceivedTensor, TensorReceiver, TensorSender
from common.errors import TriptychError
from tests.broker.transports.transport_kit import Kit, of_bytes, open_files, to, transfer
from tests.eventually import eventually

MIB = 2**20


async def fill(sender: TensorSender, receiver: TensorReceiver, sizes: list[int]) -> list[ReceivedTensor]:
    received = []
    for size in sizes:
        data = memoryview(os.urandom(size))
        received.append(await transfer(sender, receiver, of_bytes(data), data))
        assert received[-1].data == data
    return received


async def times_out(sender: TensorSender, receiver: TensorReceiver, size: int) -> bool:
    try:
        await sender.send(to(receiver.address), of_bytes(bytes(size)), memoryview(bytes(size)), timeout_s=0.1)
    except TriptychError as error:
        return error.info.code == "unavailable"
    return False


async def test_bytes_are_read_where_the_sender_has_put_them(kit: Kit) -> None:
    """No copy: what is received is mapped memory, read-only, and on a border that any dtype may have."""
    sender, receiver = kit.sender(), kit.receiver()
    for received in await fill(sender, receiver, [MIB, 100, 7]):
        array = np.frombuffer(received.data, np.uint8)
        address = array.__array_interface__["data"][0]
        assert not array.flags.writeable
        assert address % ALIGNMENT_BYTES == 0
        assert mapping_at(address) == "r--s memfd:triptych"


def mapping_at(address: int) -> str:
    """Permissions and name of the mapping that an address of this process lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split()
        start, end = (int(part, 16) for part in addresses.split("-"))
        if start <= address < end:
            return f"{permissions} {name[0].removeprefix('/')}"
    return "not mapped"


@pytest.mark.parametrize("way", ["release", "the last view", "another thread"])
async def test_room_goes_back_to_the_sender(kit: Kit, way: str) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    held = await fill(sender, receiver, [3 * MIB])
    assert await times_out(sender, receiver, 2 * MIB)
    waiting = asyncio.create_task(transfer(sender, receiver, of_bytes(bytes(2 * MIB)), memoryview(bytes(2 * MIB))))
    if way == "release":
        held[0].release()
    elif way == "the last view":
        held.clear()
    else:
        thread = threading.Thread(target=held.pop().release)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert (await waiting).fault is None


async def test_an_array_made_of_a_tensor_keeps_its_room_even_after_release(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    (received,) = await fill(sender, receiver, [3 * MIB])
    array = np.frombuffer(received.data, np.uint8)[100:200].view(np.int32)
    expected = array.copy()
    received.release()
    del received
    assert await times_out(sender, receiver, 2 * MIB)
    assert np.array_equal(array, expected)
    del array
    gc.collect()
    await fill(sender, receiver, [2 * MIB])


async def test_a_tensor_larger_than_the_arena_gets_memory_of_its_own_one_at_a_time(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    await fill(sender, receiver, [1])
    before = open_files()
    held = await fill(sender, receiver, [9 * MIB])
    assert await times_out(sender, receiver, 9 * MIB)
    held += await fill(sender, receiver, [MIB])  # small ones pass by
    held[0].release()
    held += await fill(sender, receiver, [5 * MIB])
    for received in held:
        received.release()
    held.clear()
    await eventually(lambda: open_files() <= before)


async def test_an_arena_that_is_idle_gives_its_memory_back(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_transport, "KEPT_BYTES", MIB)
    monkeypatch.setattr(shm_transport, "IDLE_S", 0.01)
    sender, receiver = kit.sender(), kit.receiver()
    held = await fill(sender, receiver, [2 * MIB, MIB])
    held[0].release()
    full = shared_bytes()
    held[1].release()
    await eventually(lambda: shared_bytes() <= full - 4 * MIB)  # 2 MiB of 3, seen by either side
    held = await fill(sender, receiver, [3 * MIB])
    assert shared_bytes() > full - 2 * MIB


def shared_bytes() -> int:
    """Shared memory that this process has in its page tables."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssShmem"))


async def test_a_greeting_that_the_receiver_cannot_encode_is_an_error_in_the_log_and_an_end(kit: Kit) -> None:
    """A subclass of int is encoded by no msgspec; without an end the sender would wait for all of HANDSHAKE_S."""

    class Size(int):
        pass

    sender, receiver = kit.sender(), kit.receiver(max_bytes=Size(MIB))
    with capture_logs() as logs, pytest.raises(TriptychError, match="closed the connection"):
        await sender.send(to(receiver.address), of_bytes(b"abcd"), memoryview(b"abcd"), timeout_s=30.0)
    (error,) = [line for line in logs if line["log_level"] == "error"]
    assert error["event"] == "a connection between processes ends by a fault of this process"


async def test_a_greeting_that_the_sender_cannot_encode_is_raised(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_transport, "encode", lambda message: msgspec.msgpack.encode(object()))
    sender, receiver = kit.sender(), kit.receiver()
    with pytest.raises(TypeError, match="unsupported"):
        await sender.send(to(receiver.address), of_bytes(b"abcd"), memoryview(b"abcd"), timeout_s=30.0)


async def test_more_tensors_than_may_be_on_their_way_wait_for_one_to_be_released(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    held = await fill(sender, receiver, [0] * QUEUE_TENSORS)
    assert await times_out(sender, receiver, 1)
    held.pop().release()
    await fill(sender, receiver, [1])


async def test_an_announcement_that_the_socket_does_not_take_at_once_follows_and_the_room_is_not_lost(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    await fill(sender, receiver, [1])
    sends = packets.PacketSocket.try_send
    refused: list[bytes] = []

    def try_send(socket: packets.PacketSocket, packet: bytes, fds: Sequence[int] = ()) -> bool:
        if len(refused) < 2:
            refused.append(packet)
            return False
        return sends(socket, packet, fds)

    monkeypatch.setattr(packets.PacketSocket, "try_send", try_send)
    held = await fill(sender, receiver, [3 * MIB])
    assert len(refused) == 2
    held.pop().release()
    await fill(sender, receiver, [4 * MIB])


async def test_of_tensors_released_in_one_turn_of_the_loop_the_sender_hears_together(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first at once: it may be the only one."""
    sender, receiver = kit.sender(), kit.receiver()
    held = await fill(sender, receiver, [MIB // 8] * 20)
    sends = packets.PacketSocket.try_send
    told: list[list[int]] = []

    def try_send(socket: packets.PacketSocket, packet: bytes, fds: Sequence[int] = ()) -> bool:
        message = for_sender(packet)
        assert isinstance(message, Release)
        told.append(message.slots)
        return sends(socket, packet, fds)

    monkeypatch.setattr(packets.PacketSocket, "try_send", try_send)
    held.pop(0).release()
    assert len(told) == 1
    while held:
        held.pop().release()
    await eventually(lambda: sum(map(len, told)) == 20)
    assert list(map(len, told)) == [1, 8, 8, 3]
    monkeypatch.undo()
    await fill(sender, receiver, [4 * MIB])


async def test_a_send_that_is_cancelled_gives_its_room_back(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    held = await fill(sender, receiver, [3 * MIB])
    for _ in range(5):
        sending = asyncio.create_task(sender.send(to(receiver.address), of_bytes(b""), memoryview(bytes(2 * MIB)), 9))
        await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    held[0].release()
    await fill(sender, receiver, [4 * MIB])


async def test_who_waits_for_a_turn_on_a_closed_connection_opens_no_other(kit: Kit) -> None:
    receiver = kit.receiver()
    connection = kit.connection(receiver.address)
    data = memoryview(bytes(3 * MIB))
    await connection.send(of_bytes(data), data, 5.0)
    waiting = [asyncio.create_task(connection.send(of_bytes(data), data, 5.0)) for _ in range(2)]
    await asyncio.sleep(0)  # the first waits for room, the second for its turn
    files = open_files()
    connection.close()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, TriptychError)
    assert open_files() <= files


async def test_a_receiver_that_closes_ends_a_waiting_send_at_once(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    held = await fill(sender, receiver, [3 * MIB])
    waiting = asyncio.create_task(sender.send(to(receiver.address), of_bytes(b""), memoryview(bytes(2 * MIB)), 60))
    await asyncio.sleep(0)
    receiver.close()
    with pytest.raises(TriptychError) as caught:
        async with asyncio.timeout(5):
            await waiting
    assert caught.value.info.code == "unavailable"
    assert held[0].data.nbytes == 3 * MIB  # still mapped


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 3000), st.floats(0, 0.999)), max_size=60))
def test_rooms_never_overlap_and_all_of_the_arena_comes_back(plan: list[int | float]) -> None:
    """Integers ask for so many bytes, floats give back one of the rooms."""
    arena = Arena(8192)
    lent: dict[int, int] = {}
    for step in plan:
        if isinstance(step, int):
            offset = arena.reserve(step)
            if offset is None:
                continue
            assert offset % ALIGNMENT_BYTES == 0
            assert offset + step <= 8192
            assert all(offset + max(step, 1) <= start or start + max(size, 1) <= offset for start, size in lent.items())
            lent[offset] = step
        elif lent:
            offset = sorted(lent)[int(step * len(lent))]
            arena.release(offset)
            del lent[offset]
    assert arena.num_reserved == len(lent)
    for offset in lent:
        arena.release(offset)
    assert arena.reserve(8192) == 0
