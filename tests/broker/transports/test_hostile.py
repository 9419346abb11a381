"""What comes in on the transports' own sockets and keys and is no tensor: dropped, counted, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from broker.cluster.curve import ClusterContext
from broker.transports.base import QUEUE_TENSORS
from broker.transports.linked import packets
from broker.transports.linked.wire import NONCE_BYTES, Announce, Release, Welcome
from broker.transports.nixl import wire as nixl_wire
from broker.transports.nixl.agent import HostMemory, NixlAgent
from broker.transports.redis import wire as redis_wire
from broker.transports.shm.wire import AnnounceBatch, Hello
from common.config import Transport
from common.errors import TriptychError
from common.keys import ClusterKey
from common.messages import encode
from tests.broker.transports.transport_kit import (
    NIXL,
    NIXL_CUDA,
    Kit,
    RawSender,
    fd_of,
    header,
    kit_of,
    of_bytes,
    open_files,
    still_works,
    to,
    transfer,
)
from tests.eventually import eventually

MIB = 2**20


@pytest.fixture
async def kit(request: pytest.FixtureRequest, redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    async with kit_of(request.param, redis, broker_url) as kit:
        yield kit


@pytest.mark.parametrize("kit", ["zmq"], indirect=True)
async def test_zmq_drops_what_is_no_tensor(kit: Kit) -> None:
    receiver = kit.receiver()
    raw = kit.raw(receiver)
    for frames in ([b"x"], [os.urandom(50), b"y"], [b"a", b"b", b"c"]):
        await raw.send_multipart(frames)
    await raw.send_multipart([encode(header([4], "float32", 16)), b"only 9 by"])
    assert (await receiver.receive()).fault is not None
    assert receiver.num_invalid == 3
    with socket.create_connection(("127.0.0.1", int(receiver.address.rsplit(":", 1)[1]))) as stranger:
        stranger.sendall(os.urandom(4096))
    await still_works(kit, receiver)


@pytest.mark.parametrize("transport", ["zmq", NIXL])
async def test_with_a_cluster_key_tensors_come_from_members_only(
    transport: Transport, redis: Redis, broker_url: str
) -> None:
    key = ClusterKey.generate()
    members = Kit(transport, redis, broker_url, ClusterContext(key))
    async with kit_of(transport, redis, broker_url) as strangers:
        receiver, data = members.receiver(), memoryview(b"four")
        for context in (strangers.context, ClusterContext(ClusterKey.generate())):
            stranger = Kit(transport, redis, broker_url, context)
            with pytest.raises(TriptychError, match="took none within"):
                await stranger.sender().send(to(receiver.address), of_bytes(data), data, timeout_s=0.5)
            await stranger.close()
        assert (await transfer(members.sender(), receiver, of_bytes(data), data)).data == data
    await members.close()


@pytest.mark.parametrize("kit", ["redis"], indirect=True)
async def test_redis_drops_what_is_no_tensor(kit: Kit) -> None:
    receiver = kit.receiver()
    key = receiver.address.partition("://")[2]
    for junk in (b"", os.urandom(100), encode([1, 2, 3]), encode({"id": "x", "size_bytes": -1})):
        await kit.redis.rpush(key, junk)
    await kit.redis.rpush(key, encode(redis_wire.Passing("y", 2**50, 5.0, of_bytes(b""))))
    more = redis_wire.Passing("z", 3, 5.0, of_bytes(b"abc"))
    await kit.redis.rpush(redis_wire.Parcel(kit.redis, key, more).key(0), b"more than three bytes")
    await kit.redis.rpush(key, encode(more))
    await eventually(lambda: receiver.num_invalid == 6)
    assert receiver.num_unfinished == 0
    await still_works(kit, receiver)


@pytest.mark.parametrize("kit", [NIXL], indirect=True)
async def test_nixl_drops_what_is_no_tensor(kit: Kit) -> None:
    receiver = kit.receiver(max_bytes=MIB)
    raw = kit.raw(receiver)
    for frames in ([b"x"], [b"a", b"b"], [encode(nixl_wire.Greeting(os.urandom(400)))]):
        await raw.send_multipart(frames)
    huge = nixl_wire.ReadablePiece(1, of_bytes(b"abc"), size_bytes=2 * MIB, start=0, num_bytes=3, address=1)
    await raw.send(encode(huge))
    answer = nixl_wire.for_sender(await raw.recv())
    assert isinstance(answer, nixl_wire.Taken)
    assert answer.fault == "greet first"
    await eventually(lambda: receiver.num_invalid == 3)
    await still_works(kit, receiver)


@pytest.mark.parametrize("kit", [NIXL_CUDA], indirect=True)
async def test_nixl_between_gpus_hands_out_no_tensor_that_is_not_whole(kit: Kit) -> None:
    """A sender that greets as it should, and then says what it likes of its tensors."""
    receiver, agent = kit.receiver(max_bytes=MIB), NixlAgent("127.0.0.1")
    memory, raw = HostMemory(agent, MIB), kit.raw(receiver)

    async def answer_to(*messages: nixl_wire.ToReceiver) -> nixl_wire.ToSender:
        for message in messages:
            await raw.send(encode(message))
        async with asyncio.timeout(20):
            return nixl_wire.for_sender(await raw.recv())

    def piece(start: int, num_bytes: int, *, number: int = 1, size: int = 100) -> nixl_wire.ReadablePiece:
        head = of_bytes(bytes(100))
        return nixl_wire.ReadablePiece(number, head, size, start, num_bytes, memory.address)

    memory.array[:16] = list(b"it reads a nonce")
    elsewhere = nixl_wire.Greeting(memory.metadata, nonce_address=memory.address + MIB)
    assert isinstance(await answer_to(elsewhere), nixl_wire.Refusal)
    greeting = nixl_wire.Greeting(memory.metadata, nonce_address=memory.address)
    assert await answer_to(greeting) == nixl_wire.ReceiverGreeting(MIB, b"it reads a nonce")
    complete = nixl_wire.Complete(1)
    assert await answer_to(complete, piece(0, 60), complete) == nixl_wire.Taken(1)
    for wrong in (piece(50, 50), piece(60, 40), piece(60, 30, size=90), piece(60, 40, number=2)):
        answer = await answer_to(piece(0, 60, number=3), wrong, nixl_wire.Complete(wrong.number))
        assert isinstance(answer, nixl_wire.Taken)
        answer = nixl_wire.for_sender(await raw.recv()) if answer.number == 3 else answer
        assert isinstance(answer, nixl_wire.Taken)
        assert answer.fault
    assert receiver._pop() is None
    assert await answer_to(piece(0, 100, number=4)) == nixl_wire.Taken(4)
    assert await answer_to(nixl_wire.Complete(4), piece(0, 60, number=5)) == nixl_wire.Taken(
        5
    )  # whichever is read first
    assert (await receiver.receive()).data.nbytes == 100
    await still_works(kit, receiver)
    agent.close()


@pytest.mark.parametrize("kit", ["shm"], indirect=True)
async def test_shared_memory_drops_whoever_greets_wrongly(kit: Kit) -> None:
    receiver = kit.receiver()
    before = open_files()
    reading, writing = os.pipe()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, MIB)
    greeting = encode(Hello(MIB))
    await RawSender(receiver).is_dropped_after(os.urandom(300))
    await RawSender(receiver).is_dropped_after(greeting)
    await RawSender(receiver).is_dropped_after(greeting, reading)
    await RawSender(receiver).is_dropped_after(greeting, unsealed)
    await RawSender(receiver).is_dropped_after(greeting, fd_of(b"another size"))
    await RawSender(receiver).is_dropped_after(greeting, *(fd_of(b"too many", size=MIB) for _ in range(3)))
    await RawSender(receiver).is_dropped_after(encode(Hello(MIB, version=99)), fd_of(b"", size=MIB))
    await RawSender(receiver).is_dropped_after(encode(Announce(0, 0, 4, of_bytes(b"abcd"))))
    await RawSender(receiver).is_dropped_after(encode(AnnounceBatch(0, 0, [of_bytes(b"abcd")])))
    await RawSender(receiver).is_dropped_after(bytes(packets.MAX_PACKET_BYTES + 1))
    assert receiver.num_invalid == 10
    os.close(writing)
    assert open_files() <= before
    await still_works(kit, receiver)


@pytest.mark.parametrize("kit", ["shm"], indirect=True)
@pytest.mark.parametrize(
    "packet",
    [
        encode(Announce(0, MIB - 3, 4, of_bytes(b"abcd"))),
        encode(Announce(0, 2**62, 2**10, of_bytes(b"abcd"))),
        encode(Announce(0, 0, 2**40, of_bytes(b"abcd"))),
        encode(AnnounceBatch(0, MIB - 65, [of_bytes(b"a"), of_bytes(b"bc")])),
        encode(AnnounceBatch(0, 2**62, [of_bytes(b"a")])),
        encode(AnnounceBatch(0, 0, [of_bytes(b"a"), header([2**40], "uint8", 2**40)])),
        encode(Hello(MIB)),
        encode(Release([0])),
        encode(Welcome(b"", 1)),
    ],
    ids=[
        "beyond the end",
        "far away",
        "too large",
        "a batch beyond the end",
        "a batch far away",
        "a batch too large",
        "a second greeting",
        "a release",
        "a welcome",
    ],
)
async def test_shared_memory_drops_whoever_points_outside_it(kit: Kit, packet: bytes) -> None:
    receiver = kit.receiver()
    sender = await RawSender(receiver).greet()
    await sender.is_dropped_after(packet)
    assert receiver.num_invalid == 1
    await still_works(kit, receiver)


@pytest.mark.parametrize("kit", ["shm"], indirect=True)
@pytest.mark.parametrize(
    "again",
    [Announce(0, 0, 4, of_bytes(bytes(4))), AnnounceBatch(0, 0, [of_bytes(bytes(4))])],
    ids=["alone", "in a batch"],
)
async def test_shared_memory_drops_whoever_lends_the_same_slot_twice_or_too_many(
    kit: Kit, again: Announce | AnnounceBatch
) -> None:
    receiver = kit.receiver()
    sender = await RawSender(receiver).greet()
    announced = Announce(0, 0, 4, of_bytes(bytes(4)))
    assert sender.socket.try_send(encode(announced))
    received = await receiver.receive()
    await sender.is_dropped_after(encode(again))
    other = await RawSender(receiver).greet()
    for slot in range(QUEUE_TENSORS):
        assert other.socket.try_send(encode(Announce(slot, 0, 4, of_bytes(bytes(4)))))
    await other.is_dropped_after(encode(Announce(QUEUE_TENSORS, 0, 4, of_bytes(bytes(4)))))
    for _ in range(QUEUE_TENSORS):
        await receiver.receive()
    received.release()
    await still_works(kit, receiver)


@pytest.mark.parametrize("kit", ["shm"], indirect=True)
async def test_a_connection_that_says_nothing_is_closed(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.transports.linked.receiver.HANDSHAKE_S", 0.05)
    receiver = kit.receiver()
    silent = RawSender(receiver)
    await eventually(lambda: silent.ended)
    await still_works(kit, receiver)


@pytest.mark.parametrize("kit", ["shm"], indirect=True)
async def test_a_receiver_that_does_not_see_the_memory_is_not_sent_to(kit: Kit) -> None:
    """It answers with a nonce of its own, as one would behind something that only passes packets on."""
    loop = asyncio.get_running_loop()
    listener = packets.listen("triptych-test-blind")
    ends: list[packets.PacketSocket] = []

    def accept() -> None:
        connected, _ = listener.accept()
        connected.setblocking(False)
        end = packets.PacketSocket(connected, lambda packet, fds: packets.close_all(fds), lambda error: None)
        end.try_send(encode(Welcome(bytes(NONCE_BYTES), MIB)))
        ends.append(end)

    loop.add_reader(listener, accept)
    boot = kit.receiver().address.partition("://")[2].partition("/")[0]
    connection = kit.connection(f"shm+unix://{boot}/triptych-test-blind")
    with pytest.raises(TriptychError, match=r"does not see|closed"):
        await connection.send(of_bytes(b"x"), memoryview(b"x"), 5.0)
    loop.remove_reader(listener)
    listener.close()
    for end in ends:
        end.close()
