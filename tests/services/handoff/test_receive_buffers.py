"""Where encoder outputs land: checked while they are copied, and never written again once they are used."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch

from broker.transports.received import PushedTensor, PushTarget, ReceivedTensor
from broker.transports.shm import push_buffer, segment
from common.hashing import checksum
from common.messages import TensorHeader
from services.handoff.payloads import bytes_of
from services.handoff.receive_buffers import ReceiveBuffers
from tests.eventually import eventually

KEY = ("r", 0, 0)
SHAPE = [300, 16]
SIZE = 300 * 16 * 2


def received(data: bytes) -> ReceivedTensor:
    header = TensorHeader(*KEY, "e0", 1, SHAPE, "bfloat16", SIZE, checksum=checksum(data))
    return ReceivedTensor(header, memoryview(data))


def given_room(data: bytes) -> tuple[PushTarget, np.ndarray]:
    """Memory that a sender has given, and the sender's view of it."""
    fd, written = segment.create(SIZE)
    room = PushTarget(received(data).header, segment.open_received(fd, SIZE, writable=True))
    os.close(fd)
    return room, written


def completed(room: PushTarget, written: np.ndarray, data: bytes) -> PushedTensor:
    written[:] = np.frombuffer(data, np.uint8)
    tensor = room.complete(received(data).header)
    assert tensor is not None
    return tensor


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors as small as these are given memory."""
    monkeypatch.setattr(push_buffer, "MIN_BYTES", 1)


def damaged(data: bytes) -> ReceivedTensor:
    whole = received(data)
    return ReceivedTensor(whole.header, memoryview(data[:-1] + bytes([data[-1] ^ 1])))


async def test_a_tensor_lands_where_it_was_waited_for() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")  # a grant that was told twice
    assert len(landing) == 1
    tensor = await landing.receive(KEY, received(data))
    assert isinstance(tensor, torch.Tensor)
    assert (list(tensor.shape), tensor.dtype) == (SHAPE, torch.bfloat16)
    assert bytes_of(tensor) == data
    assert len(landing) == 0


async def test_damaged_bytes_are_a_fault_and_the_tensor_is_waited_for_again() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    assert "damaged" in str(await landing.receive(KEY, damaged(data)))
    assert len(landing) == 1
    tensor = await landing.receive(KEY, received(data))
    assert isinstance(tensor, torch.Tensor)
    assert bytes_of(tensor) == data


async def test_what_comes_twice_is_not_written_over_what_is_used() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    first = await landing.receive(KEY, received(data))
    second = await landing.receive(KEY, received(bytes(SIZE)))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert bytes_of(first) == data
    assert bytes_of(second) == bytes(SIZE)


async def test_what_is_waited_for_no_more_is_let_go() -> None:
    landing = ReceiveBuffers()
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    landing.discard(KEY)
    landing.discard(KEY)
    assert len(landing) == 0


async def test_a_header_that_disagrees_with_its_bytes_is_not_copied() -> None:
    landing = ReceiveBuffers()
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    whole = received(bytes(SIZE))
    short = ReceivedTensor(msgspec.structs.replace(whole.header, size_bytes=4), memoryview(b"four"), "4 bytes")
    assert await landing.receive(KEY, short) == "4 bytes"
    assert len(landing) == 1


async def test_it_lands_while_threads_of_others_are_all_busy() -> None:
    free = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(free.wait, 60))
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    async with asyncio.timeout(10):
        assert isinstance(await landing.receive(KEY, received(data)), torch.Tensor)
    assert not busy.done()
    free.set()
    await busy


async def test_its_threads_end_with_it() -> None:
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    landing = ReceiveBuffers()
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    await landing.receive(KEY, received(os.urandom(SIZE)))
    own = {thread for thread in threading.enumerate() if thread.name.startswith("receive")} - before
    assert own
    del landing
    await eventually(lambda: not own & set(threading.enumerate()))


async def test_what_comes_in_memory_that_was_given_stays_there() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    room, written = given_room(data)
    landing.expect(KEY, room)
    tensor = await landing.receive(KEY, completed(room, written, data))
    assert isinstance(tensor, torch.Tensor)
    assert (list(tensor.shape), tensor.dtype, bytes_of(tensor)) == (SHAPE, torch.bfloat16, data)
    assert len(landing) == 0
    written[5] ^= 1  # the same memory: who gives it has to keep his hands off
    assert bytes_of(tensor) != data


async def test_memory_that_is_given_is_touched_without_writing_to_it() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    room, written = given_room(data)
    written[:] = np.frombuffer(data, np.uint8)
    landing.expect(KEY, room)
    await asyncio.wait_for(asyncio.wrap_future(landing._touching.submit(lambda: None)), 5)
    assert written.tobytes() == data


async def test_memory_is_made_only_for_those_who_do_not_give_it(small: None) -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    assert landing._buffers[KEY] is not None
    room, written = given_room(data)
    landing.expect(KEY, room)
    await landing.receive(KEY, completed(room, written, data))
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    assert landing._buffers[KEY] is None
    tensor = await landing.receive(KEY, received(data))  # it comes in another way after all
    assert isinstance(tensor, torch.Tensor)
    assert bytes_of(tensor) == data
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    assert landing._buffers[KEY] is not None


async def test_given_memory_is_let_go_where_nobody_waits_for_it() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    unknown, _ = given_room(data)
    landing.expect(KEY, unknown)
    assert len(landing) == 0
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    rooms = [given_room(data)[0] for _ in range(2)]
    for room in rooms:
        landing.prepare(KEY, "e0", SHAPE, "bfloat16")
        landing.expect(KEY, room)
    assert rooms[0].complete(received(data).header) is None  # another has taken its place
    landing.discard(KEY)
    assert rooms[1].complete(received(data).header) is None


async def test_damaged_bytes_in_given_memory_are_a_fault_and_may_come_again_in_any_way() -> None:
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    room, written = given_room(data)
    landing.expect(KEY, room)
    written[:] = np.frombuffer(data, np.uint8)
    room.read_to(SIZE - 1)
    written[-1] ^= 1
    tensor = room.complete(received(data).header)
    assert tensor is not None
    assert "damaged" in str(await landing.receive(KEY, tensor))
    assert len(landing) == 1
    again = await landing.receive(KEY, received(data))
    assert isinstance(again, torch.Tensor)
    assert bytes_of(again) == data


async def test_more_given_memory_than_a_process_can_map_is_copied_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.handoff.receive_buffers.MAX_KEPT", 1)
    landing, data = ReceiveBuffers(), os.urandom(SIZE)
    kept = []
    for _ in range(2):
        landing.prepare(KEY, "e0", SHAPE, "bfloat16")
        room, written = given_room(data)
        landing.expect(KEY, room)
        kept.append(await landing.receive(KEY, completed(room, written, data)))
        written[0] ^= 1
    in_place, copied = kept
    assert isinstance(in_place, torch.Tensor)
    assert bytes_of(in_place) != data
    assert isinstance(copied, torch.Tensor)
    assert bytes_of(copied) == data
    del in_place
    kept.clear()
    room, written = given_room(data)
    landing.prepare(KEY, "e0", SHAPE, "bfloat16")
    landing.expect(KEY, room)
    tensor = await landing.receive(KEY, completed(room, written, data))
    written[0] ^= 1
    assert isinstance(tensor, torch.Tensor)
    assert bytes_of(tensor) != data
