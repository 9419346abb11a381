"""Where encoder outputs land: checked while they are copied, and never written again once they are used."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from broker.transports.base import ReceivedTensor
from common.hashing import checksum
from common.messages import TensorHeader
from services.landing import Landing
from services.tensor_bytes import bytes_of
from tests.eventually import eventually

KEY = ("r", 0, 0)
SHAPE = [300, 16]
SIZE = 300 * 16 * 2


def received(data: bytes) -> ReceivedTensor:
    header = TensorHeader(*KEY, "e0", 1, SHAPE, "bfloat16", SIZE, checksum=checksum(data))
    return ReceivedTensor(header, memoryview(data))


def damaged(data: bytes) -> ReceivedTensor:
    whole = received(data)
    return ReceivedTensor(whole.header, memoryview(data[:-1] + bytes([data[-1] ^ 1])))


async def test_a_tensor_lands_where_it_was_waited_for() -> None:
    landing, data = Landing(), os.urandom(SIZE)
    landing.prepare(KEY, SHAPE, "bfloat16")
    landing.prepare(KEY, SHAPE, "bfloat16")  # a grant that was told twice
    assert len(landing) == 1
    tensor = await landing.take(KEY, received(data))
    assert isinstance(tensor, torch.Tensor)
    assert (list(tensor.shape), tensor.dtype) == (SHAPE, torch.bfloat16)
    assert bytes_of(tensor) == data
    assert len(landing) == 0


async def test_damaged_bytes_are_a_fault_and_the_tensor_is_waited_for_again() -> None:
    landing, data = Landing(), os.urandom(SIZE)
    landing.prepare(KEY, SHAPE, "bfloat16")
    assert "damaged" in str(await landing.take(KEY, damaged(data)))
    assert len(landing) == 1
    tensor = await landing.take(KEY, received(data))
    assert isinstance(tensor, torch.Tensor)
    assert bytes_of(tensor) == data


async def test_what_comes_twice_is_not_written_over_what_is_used() -> None:
    landing, data = Landing(), os.urandom(SIZE)
    landing.prepare(KEY, SHAPE, "bfloat16")
    first = await landing.take(KEY, received(data))
    second = await landing.take(KEY, received(bytes(SIZE)))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert bytes_of(first) == data
    assert bytes_of(second) == bytes(SIZE)


async def test_what_is_waited_for_no_more_is_let_go() -> None:
    landing = Landing()
    landing.prepare(KEY, SHAPE, "bfloat16")
    landing.drop(KEY)
    landing.drop(KEY)
    assert len(landing) == 0


async def test_a_header_that_disagrees_with_its_bytes_is_not_copied() -> None:
    landing = Landing()
    landing.prepare(KEY, SHAPE, "bfloat16")
    whole = received(bytes(SIZE))
    short = ReceivedTensor(msgspec.structs.replace(whole.header, size_bytes=4), memoryview(b"four"), "4 bytes")
    assert await landing.take(KEY, short) == "4 bytes"
    assert len(landing) == 1


async def test_it_lands_while_threads_of_others_are_all_busy() -> None:
    free = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(free.wait, 60))
    landing, data = Landing(), os.urandom(SIZE)
    landing.prepare(KEY, SHAPE, "bfloat16")
    async with asyncio.timeout(10):
        assert isinstance(await landing.take(KEY, received(data)), torch.Tensor)
    assert not busy.done()
    free.set()
    await busy


async def test_its_threads_end_with_it() -> None:
    before = threading.active_count()
    landing = Landing()
    landing.prepare(KEY, SHAPE, "bfloat16")
    await landing.take(KEY, received(os.urandom(SIZE)))
    assert threading.active_count() > before
    del landing
    await eventually(lambda: threading.active_count() <= before)
