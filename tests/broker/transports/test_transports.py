"""What every transport of tensors has to do, whichever it is: the same tests for all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from redis.asyncio import Redis

from broker.transports.tensors import ITEM_BYTES, ReceivedTensor, TensorSender
from common.errors import TriptychError
from common.hashing import checksum
from tests.broker.transports.transport_kit import (
    NIXL,
    NIXL_CUDA,
    Kit,
    header,
    keys_without_expiry,
    kit_of,
    listening_addresses,
    of_bytes,
    open_files,
    receive,
    shared_files,
    to,
    transfer,
)
from tests.eventually import eventually

MIB = 2**20
TRANSPORTS = ["zmq", "shm", "redis", NIXL, "cuda", NIXL_CUDA]


@pytest.fixture(params=TRANSPORTS)
async def kit(request: pytest.FixtureRequest, redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    async with kit_of(request.param, redis, broker_url) as kit:
        yield kit


async def test_every_dtype_arrives_as_it_left(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    for dtype, item_bytes in ITEM_BYTES.items():
        data = memoryview(os.urandom(7 * 64 * item_bytes))
        sent = header([7, 64], dtype, data.nbytes)
        received = await transfer(sender, receiver, sent, data)
        assert received.fault is None
        assert received.header == msgspec.structs.replace(sent, checksum=checksum(data))
        assert received.data == data


async def test_tensors_of_one_request_arrive_in_order_over_one_connection(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    parts = [memoryview(os.urandom(size)) for size in (3, MIB, 0, 5 * MIB, 64)]

    async def send_all() -> None:
        for number, data in enumerate(parts):
            head = of_bytes(data, part=number, table="self", first=16 * number)
            await sender.send(to(receiver.address), head, data, timeout_s=20)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(send_all())
        for number, data in enumerate(parts):
            received = await receive(receiver)
            assert received.fault is None
            assert received.header.part == number
            assert received.data == data
    assert sender.num_sent.total() == len(parts)


async def test_sizes_around_every_border_arrive_whole(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    source = memoryview(os.urandom(9 * MIB))
    for size in (0, 1, 63, 64, 65, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB, 9 * MIB):
        received = await transfer(sender, receiver, of_bytes(source[:size]), source[:size])
        assert received.fault is None
        assert received.data == source[:size]
        received.release()


@pytest.fixture(scope="module")
def half_a_gibibyte() -> memoryview:
    return memoryview(np.arange(512 * MIB // 8, dtype=np.int64)).cast("B")


@pytest.mark.slow
async def test_half_a_gibibyte_arrives_whole(kit: Kit, half_a_gibibyte: memoryview) -> None:
    data = half_a_gibibyte
    if kit.on_device:
        pytest.skip("tensors larger than half of its arena go another way")
    sender, receiver = kit.sender(), kit.receiver(max_bytes=512 * MIB)
    received = await transfer(sender, receiver, of_bytes(data), data, timeout_s=120)
    assert received.fault is None
    assert np.array_equal(np.frombuffer(received.data, np.int64), np.frombuffer(data, np.int64))


async def test_a_received_tensor_outlives_both_ends(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    data = memoryview(os.urandom(MIB))
    received = await transfer(sender, receiver, of_bytes(data), data)
    await kit.close()
    assert received.data == data


async def test_a_released_tensor_can_no_longer_be_read_and_releasing_twice_is_fine(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    received = await transfer(sender, receiver, of_bytes(bytes(64)), memoryview(bytes(64)))
    received.release()
    received.release()
    with pytest.raises(ValueError, match="released"):
        bytes(received.data)


@pytest.mark.parametrize("way", ["in place", "while copying"])
async def test_a_flipped_byte_is_a_fault_and_the_next_tensor_is_none(kit: Kit, way: str) -> None:
    """The checksum comes from the sender with the header; the byte flips where the bytes have arrived."""
    if kit.on_device:
        pytest.skip("the memory of a GPU has no checksum")
    sender, receiver = kit.sender(), kit.receiver()
    data, target = os.urandom(3 * MIB + 17), memoryview(bytearray(3 * MIB + 17))

    async def look(received: ReceivedTensor) -> str | None:
        return await received.verify() if way == "in place" else await received.copy_into(target)

    for position in (0, len(data) // 2, len(data) - 1, None):
        received = await transfer(sender, receiver, of_bytes(data), memoryview(data))
        bytes_now = bytearray(received.data)
        if position is not None:
            bytes_now[position] ^= 0x10
        fault = await look(msgspec.structs.replace(received, data=memoryview(bytes_now)))
        assert ("damaged" in str(fault)) == (position is not None)
        received.release()
    assert target == data or way == "in place"


async def test_a_header_that_disagrees_with_its_bytes_is_a_fault(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    for wrong in (header([4], "float32", 16), header([9], "uint8", 8), header([9], "nonsense", 9)):
        received = await transfer(sender, receiver, wrong, memoryview(b"only 9 by"))
        assert received.fault is not None
        assert received.header.shape == wrong.shape


async def test_too_large_a_tensor_is_never_received_and_the_next_one_is(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver(max_bytes=MIB)
    record = to(receiver.address)
    with contextlib.suppress(TriptychError):  # ZMQ's receiver closes the connection instead of saying a word
        await sender.send(record, of_bytes(bytes(8 * MIB)), memoryview(bytes(8 * MIB)), timeout_s=1.0)
    small = memoryview(os.urandom(1000))
    async with asyncio.timeout(30):
        receiving = asyncio.create_task(receiver.receive())
        while not receiving.done():  # what follows on a connection that is being closed is lost with it
            with contextlib.suppress(TriptychError):
                await sender.send(record, of_bytes(small), small, timeout_s=5.0)
            await asyncio.wait({receiving}, timeout=0.5)
    assert receiving.result().data == small


async def test_a_receiver_that_is_not_there_is_unavailable_within_the_deadline(kit: Kit) -> None:
    receiver = kit.receiver()
    address = receiver.address
    receiver.close()
    await eventually(lambda: not is_listening(address))  # ZMQ closes its sockets on a thread of its own
    sender = kit.sender()
    began_s = time.monotonic()
    with pytest.raises(TriptychError) as caught:
        await sender.send(to(address), of_bytes(b"x"), memoryview(b"x"), timeout_s=0.3)
    assert caught.value.info.code == "unavailable"
    assert time.monotonic() - began_s < 10.0


def is_listening(address: str) -> bool:
    """Whether somebody takes connections at an address of TCP; False for any other."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if not scheme.endswith("tcp"):
        return False
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


async def test_many_senders_at_once_lose_and_mix_nothing(kit: Kit) -> None:
    receiver = kit.receiver()
    draw = random.Random(7)
    plans = {s: [draw.randrange(300_000) for _ in range(30)] for s in range(4)}

    async def send_all(number: int) -> None:
        sender = kit.sender()
        for part, size in enumerate(plans[number]):
            data = memoryview(bytes([number]) * size)
            await sender.send(to(receiver.address), of_bytes(data, part=part, sender=f"e{number}"), data, 20.0)

    arrived: dict[str, list[int]] = {f"e{s}": [] for s in plans}
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for number in plans:
            group.create_task(send_all(number))
        for _ in range(sum(map(len, plans.values()))):
            received = await receive(receiver)
            assert received.fault is None
            arrived[received.header.sender].append(received.data.nbytes)
            received.release()
    assert arrived == {f"e{s}": sizes for s, sizes in plans.items()}


async def test_what_is_not_told_otherwise_listens_on_loopback_only(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver()
    (await transfer(sender, receiver, of_bytes(b"x"), memoryview(b"x"))).release()
    listening = listening_addresses()
    assert all(address.is_loopback for address in listening)
    assert listening or kit.transport not in ("zmq", "nixl", "nixl+cuda")


async def test_closed_ends_leave_no_descriptor_no_file_and_no_key(redis: Redis, broker_url: str, kit: Kit) -> None:
    await kit.warm_up()
    before, files = open_files(), shared_files()
    async with kit_of(kit.transport, redis, broker_url) as other:
        sender, receiver = other.sender(), other.receiver()
        received = await transfer(sender, receiver, of_bytes(bytes(MIB)), memoryview(bytes(MIB)))
        in_use = open_files()
        received.release()
        del received
    assert in_use > before
    await redis.connection_pool.disconnect()
    await redis.ping()
    await eventually(lambda: open_files() <= before)
    assert shared_files() <= files
    assert await keys_without_expiry(redis) == []


async def test_keep_only_closes_the_connections_to_receivers_that_are_gone(kit: Kit) -> None:
    sender, one, other = kit.sender(), kit.receiver(), kit.receiver()
    for receiver in (one, other):
        (await transfer(sender, receiver, of_bytes(b"x"), memoryview(b"x"))).release()
    open_before = open_files()
    sender.keep_only([to(one.address)])
    if kit.transport != "redis":  # which has no connection of its own
        await eventually(lambda: open_files() < open_before)
    for receiver in (one, other):  # a connection that was kept, and one that is made again
        assert (await transfer(sender, receiver, of_bytes(b"y"), memoryview(b"y"))).data == b"y"


async def until_refused(sender: TensorSender, address: str, data: memoryview, timeout_s: float) -> str:
    """Send until it fails, as it must at the latest when every queue is full; the code of the error."""
    for _ in range(200):
        try:
            await sender.send(to(address), of_bytes(data), data, timeout_s)
        except TriptychError as error:
            return error.info.code
    return "never"


@pytest.mark.cluster
async def test_a_sender_killed_amid_a_tensor_leaves_nothing_and_blocks_nobody(kit: Kit, redis: Redis) -> None:
    await kit.warm_up()
    receiver, files = kit.receiver(), shared_files()
    before = open_files()
    patience_s = ["30"] if kit.transport != "redis" else []  # there, what is left lasts as long as it would have waited
    victim = await kit.peer("send", receiver.address, "64", *patience_s)
    received = await receive(receiver)
    assert received.fault is None
    await victim.kill()  # it has been sending on and on
    data, mine = memoryview(os.urandom(MIB)), kit.sender()
    async with asyncio.TaskGroup() as group:  # a tensor that cannot be sent is not waited for
        group.create_task(mine.send(to(receiver.address), of_bytes(data), data, timeout_s=10))
        while (last := await receiver.receive()).header.sender == "peer":
            last.release()
        assert last.data == data
    assert received.data.nbytes == 64 * MIB  # mapped still
    assert not any(received.data[:: 2**16])
    received.release()
    last.release()
    mine.close()
    assert shared_files() <= files
    assert await keys_without_expiry(redis) == []
    if kit.transport != "redis":  # whose pool keeps connections for the next time
        await eventually(lambda: open_files() <= before + 1)


@pytest.mark.cluster
async def test_a_receiver_killed_while_it_holds_tensors_costs_the_sender_a_deadline_and_nothing_else(
    kit: Kit, redis: Redis
) -> None:
    await kit.warm_up()
    peer = await kit.peer("hold")
    address = await peer.line()
    sender, files = kit.sender(), shared_files()
    before = open_files()
    data = memoryview(bytes(8 * MIB))
    for _ in range(3):
        await sender.send(to(address), of_bytes(data), data, timeout_s=10)
        assert await peer.line() == "ok"
    await peer.kill()
    began_s = time.monotonic()
    assert await until_refused(sender, address, data, timeout_s=0.5) == "unavailable"  # ZMQ may take the first ones
    assert time.monotonic() - began_s < 20.0
    sender.close()
    if kit.transport != "redis":
        await eventually(lambda: open_files() <= before + 1)
    assert shared_files() <= files
    assert await keys_without_expiry(redis) == []


@pytest.mark.cluster
async def test_a_stopped_receiver_costs_its_own_sender_a_deadline_and_others_nothing(kit: Kit) -> None:
    peer = await kit.peer("receive")
    address = await peer.line()
    sender, healthy = kit.sender(), kit.receiver()
    data = memoryview(os.urandom(4 * MIB))
    await sender.send(to(address), of_bytes(data), data, timeout_s=10)
    assert await peer.line() == "ok"
    peer.signal(signal.SIGSTOP)
    async with asyncio.timeout(60):
        stuck = asyncio.create_task(until_refused(sender, address, data, timeout_s=1.0))
        for _ in range(10):
            (await transfer(sender, healthy, of_bytes(data), data)).release()
        assert await stuck == "unavailable"
        peer.signal(signal.SIGCONT)
        await sender.send(to(address), of_bytes(data), data, timeout_s=10)
        assert await peer.line() == "ok"
