"""100,000 hostile inputs through every way onto the wire: each is a message or an error, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time

import msgspec
import pytest
import zmq

from broker.cluster.curve import ClusterContext
from broker.cluster.rpc import WorkerServer
from broker.handoff.channels import ChannelReader, stream_key
from broker.transports.factory import TransportContext
from broker.transports.tensors import TensorReceiver, payload_fault
from common.errors import TriptychError
from common.messages import Abort, Grant, Offer, TensorHeader, decode_handoff, encode
from tests.eventually import eventually
from tests.security.mutations import NUMBERS, SEED, decoded, hostile
from tests.security.real_messages import HEADER, MESSAGES, WIRE
from tests.security.test_curve import resident_bytes

PER_DECODER = 20_000
GROWTH_BYTES = 32 * 2**20

pytestmark = pytest.mark.usefixtures("quiet_logs")  # thousands of warnings would hide what `make fuzz` prints


@pytest.mark.parametrize("decode", WIRE, ids=lambda decode: type(WIRE[decode][0]).__name__)
def test_decoding_gives_a_message_or_an_error(decode):
    kinds = tuple(type(message) for message in MESSAGES[decode])
    rng, outcomes = random.Random(SEED), {"message": 0, "error": 0}
    before = resident_bytes()
    for data in hostile(rng, WIRE[decode], PER_DECODER):
        outcome = decoded(decode, data, TriptychError)
        if isinstance(outcome, TriptychError):
            outcomes["error"] += 1
            assert outcome.info.code == "invalid_request"
            assert len(outcome.info.message) < 1000
        else:
            outcomes["message"] += 1
            assert isinstance(outcome, kinds)
            assert_harmless(outcome)
    gc.collect()
    assert resident_bytes() - before < GROWTH_BYTES
    assert min(outcomes.values()) > PER_DECODER / 100  # neither kind is rare: the test reaches both


def assert_harmless(message: object) -> None:
    """What got through can be encoded again, is told apart by its sizes without an exception, and has finite times."""
    assert type(message) is type(msgspec.msgpack.decode(encode(message), type=type(message)))
    if isinstance(message, Offer | TensorHeader):
        fault = payload_fault(message, 49152)
        assert fault is None or len(fault) < 2000
    assert math.isfinite(getattr(message, "deadline_s", 0.0))


@pytest.mark.parametrize("value", NUMBERS)
def test_a_deadline_is_a_finite_number(value):
    for wire in WIRE[decode_handoff][:2]:
        fields = msgspec.msgpack.decode(wire)
        hostile_bytes = msgspec.msgpack.encode({**fields, "deadline_s": value})
        if math.isfinite(value):
            earliest_s = time.monotonic() + value
            assert earliest_s <= decode_handoff(hostile_bytes).deadline_s <= time.monotonic() + value
        else:
            with pytest.raises(TriptychError, match="float"):
                decode_handoff(hostile_bytes)


async def test_the_request_socket_survives(make_context, key):
    """Members, too, may send anything: what is no message is counted, and the next real one arrives."""
    context: ClusterContext = make_context(key)
    server = WorkerServer(context)
    hostile_member = make_client(context, server.address)
    rng = random.Random(SEED)
    before = resident_bytes()
    for round_number in range(4):
        for data in hostile(rng, WIRE[next(iter(WIRE))], 500):
            frames = [data] * rng.choice((1, 1, 1, 2, 5))
            await hostile_member.send_multipart(frames)
        await hostile_member.send(encode(Abort(f"last of {round_number}")))
        async with asyncio.timeout(20):
            while (await server.receive())[1] != Abort(f"last of {round_number}"):
                pass
    assert server.num_invalid > 500
    assert resident_bytes() - before < GROWTH_BYTES
    hostile_member.close(linger=0)


async def test_the_tensor_socket_survives(make_context, key):
    context: ClusterContext = make_context(key)
    receiver = TensorReceiver(TransportContext(context, transport="zmq"), max_bytes=2**20)
    address = next(a for a in receiver.address.split() if a.startswith("tcp://"))
    hostile_member = make_client(context, address)
    rng = random.Random(SEED)
    before = resident_bytes()
    arrived: list[str] = []

    async def receive() -> None:
        while True:
            received = await receiver.receive()
            await received.verify()
            arrived.append(received.header.request_id)
            received.release()

    task = asyncio.create_task(receive())
    for data in hostile(rng, [encode(HEADER)], 2000):
        await hostile_member.send_multipart([data, rng.randbytes(rng.randrange(64))][: rng.choice((1, 2, 2, 2))])
    last = TensorHeader("the last", 0, 0, "e0", 7, [1], "uint8", 1)
    await hostile_member.send_multipart([encode(last), b"x"])
    await eventually(lambda: arrived[-1:] == ["the last"], timeout_s=20)
    assert receiver.num_invalid > 500
    assert resident_bytes() - before < GROWTH_BYTES
    task.cancel()
    receiver.close()
    hostile_member.close(linger=0)


async def test_the_reader_of_channels_survives(redis):
    """Entries without the field, with noise in it, with damaged messages: dropped, removed, the next one is read."""
    reader = ChannelReader(redis, "fuzzed", "d0", ("metadata",))
    await reader.open()
    stream, rng = stream_key("fuzzed", "d0", "metadata"), random.Random(SEED)
    for _ in range(20):
        async with redis.pipeline(transaction=False) as pipe:
            for data in hostile(rng, WIRE[decode_handoff], 100):
                pipe.xadd(stream, {rng.choice((b"m", b"m", b"m", b"other")): data})
            await pipe.execute()
    await redis.xadd(stream, {b"m": encode(Grant("the last", 0, 0, "granted"))})
    heard: list[str] = []
    reading = asyncio.create_task(reader.run(lambda delivery: heard.append(delivery.message.request_id)))
    await eventually(lambda: "the last" in heard)
    assert reader.num_invalid > 500

    async def is_empty() -> bool:
        return await redis.xlen(stream) == 0

    await eventually(is_empty)
    reading.cancel()
    await reader.delete()


def make_client(context: ClusterContext, address: str) -> zmq.asyncio.Socket:
    from broker.cluster.curve import secure_connect

    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    secure_connect(socket, address)
    return socket
