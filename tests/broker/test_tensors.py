"""Tensors as raw bytes: unchanged, uncopied, checked, and never queued for a receiver that is not there."""

from __future__ import annotations

import asyncio
import os

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from broker.tensors import TensorReceiver, TensorSender, payload_fault
from common.errors import TriptychError
from common.hashing import checksum
from common.messages import InstanceRecord, TensorHeader, encode
from tests.broker.conftest import make_record


def to(address: str) -> InstanceRecord:
    return make_record("d0", "prefill_decode", tensor_address=address)


def header(shape: list[int], dtype: str, size_bytes: int) -> TensorHeader:
    return TensorHeader("r", 0, 0, "e0", 1, shape, dtype, size_bytes)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bfloat16", 2), ("float32", 4)])
async def test_bytes_arrive_as_they_left(zmq_context: zmq.asyncio.Context, dtype: str, item_bytes: int) -> None:
    receiver, sender = TensorReceiver(zmq_context, max_bytes=2**22), TensorSender(zmq_context)
    for rows in (1, 7, 4096):
        data = memoryview(os.urandom(rows * 64 * item_bytes))
        sent = header([rows, 64], dtype, data.nbytes)
        await sender.send(to(receiver.address), sent, data, timeout_s=5)
        received = await receiver.receive()
        assert received.fault is None
        assert received.header == msgspec.structs.replace(sent, checksum=checksum(data))
        assert received.data == data
    sender.close()
    receiver.close()


async def test_a_received_tensor_outlives_its_message_and_the_socket(zmq_context: zmq.asyncio.Context) -> None:
    receiver, sender = TensorReceiver(zmq_context, max_bytes=2**22), TensorSender(zmq_context)
    array = np.arange(2**18, dtype=np.float32)
    await sender.send(to(receiver.address), header([2**18], "float32", array.nbytes), memoryview(array).cast("B"), 5)
    data = (await receiver.receive()).data
    sender.close()
    receiver.close()
    zmq_context.destroy(linger=0)
    assert np.array_equal(np.frombuffer(data, np.float32), array)


async def test_what_is_no_tensor_is_dropped_and_what_does_not_add_up_is_marked(
    zmq_context: zmq.asyncio.Context,
) -> None:
    receiver = TensorReceiver(zmq_context, max_bytes=2**20)
    raw = zmq_context.socket(zmq.DEALER)
    raw.connect(receiver.address)
    for frames in ([b"x"], [os.urandom(50), b"y"], [b"a", b"b", b"c"]):
        await raw.send_multipart(frames)
    await raw.send_multipart([encode(header([4], "float32", 16)), b"only 9 by"])
    received = await receiver.receive()
    assert receiver.num_invalid == 3
    assert received.fault is not None
    raw.close(linger=0)
    receiver.close()


async def test_an_oversized_payload_never_reaches_memory(zmq_context: zmq.asyncio.Context) -> None:
    receiver = TensorReceiver(zmq_context, max_bytes=2**20)
    raw = zmq_context.socket(zmq.DEALER)
    raw.connect(receiver.address)
    await raw.send_multipart([encode(header([2**21], "uint8", 2**21)), bytes(2**21)])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await receiver.receive()
    raw.close(linger=0)
    receiver.close()


async def test_a_receiver_that_is_not_there_is_unavailable_within_the_deadline(
    zmq_context: zmq.asyncio.Context,
) -> None:
    sender = TensorSender(zmq_context)
    with pytest.raises(TriptychError, match="took none within") as caught:
        await sender.send(to("tcp://127.0.0.1:1"), header([1], "uint8", 1), memoryview(b"x"), timeout_s=0.1)
    assert caught.value.info.code == "unavailable"
    sender.close()


def test_faults_name_the_numbers() -> None:
    assert payload_fault(header([2, 3], "bfloat16", 12), 12) is None
    assert "24 bytes" in str(payload_fault(header([2, 3], "float32", 12), 12))
    assert "there are 5" in str(payload_fault(header([3], "uint8", 3), 5))
    assert "negative" in str(payload_fault(header([-2, -3], "float32", 24), 24))
    assert "complex128" in str(payload_fault(header([1], "complex128", 16), 16))
