"""What the other side may be like: dead amid a tensor, slow, or asked again and again over the same connection."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio
from redis.asyncio import Redis

from broker.transports.cuda import sender as cuda_transport
from broker.transports.nixl.agent import NixlAgent
from broker.transports.nixl.receiver import NixlReceiver
from broker.transports.nixl.sender import NixlLink
from broker.transports.nixl.wire import FORGET_S
from broker.transports.redis.receiver import RedisReceiver
from broker.transports.redis.sender import RedisConnection
from broker.transports.shm import sender as shm_transport
from broker.transports.tensors import TensorReceiver
from common.errors import TriptychError
from tests.broker.transports.relay import Relay
from tests.broker.transports.transport_kit import (
    NIXL,
    NIXL_CUDA,
    Kit,
    keys_without_expiry,
    kit_of,
    of_bytes,
    receive,
    sockets,
    to,
    transfer,
)
from tests.eventually import eventually

MIB = 2**20


@pytest.fixture(params=["zmq", "shm", "redis", NIXL, "cuda", NIXL_CUDA])
async def kit(request: pytest.FixtureRequest, redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    async with kit_of(request.param, redis, broker_url) as kit:
        yield kit


class Pause:
    """Stops every call of a method for good places: `reached` after the first one, all go on with `over`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str) -> None:
        self.reached, self.over = asyncio.Event(), asyncio.Event()
        original: Callable[..., Any] = getattr(owner, name)

        async def paused(*args: Any) -> Any:
            result = await original(*args)
            self.reached.set()
            await self.over.wait()
            return result

        monkeypatch.setattr(owner, name, paused)


@pytest.mark.cluster
@pytest.mark.parametrize("kit", ["redis", NIXL, NIXL_CUDA], indirect=True)
async def test_a_sender_killed_after_its_first_chunk_costs_nobody_else_anything(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come of its tensor is let go of, and never given to anybody."""
    owner, name = (RedisReceiver, "_answer") if kit.transport == "redis" else (NixlAgent, "read")
    receiver = kit.receiver()
    await transfer(kit.sender(), receiver, of_bytes(b"x"), memoryview(b"x"))
    with monkeypatch.context() as patch:
        pause = Pause(patch, owner, name)
        victim = await kit.peer("send", receiver.address, "64", "60.0")
        async with asyncio.timeout(60):
            await pause.reached.wait()
        await victim.kill()
        pause.over.set()
    data = memoryview(os.urandom(MIB))
    received = await transfer(kit.sender(), receiver, of_bytes(data), data, timeout_s=10)
    assert (received.header.sender, received.data, received.fault) == ("e0", data, None)
    num_begun = 0 if kit.on_device else 1  # what is read first there is the nonce of a greeting
    await eventually(
        lambda: (num_collecting(receiver), receiver.num_unfinished) == (0, num_begun), timeout_s=2 * FORGET_S
    )
    assert receiver.num_invalid == 0
    assert await keys_without_expiry(redis) == []


def num_collecting(receiver: TensorReceiver) -> int:
    """Tensors of which a part has come, and memory is held for them."""
    end = receiver._receivers[0]
    if isinstance(end, RedisReceiver):
        return len(end._tasks) - 1  # one listens
    ends = [end for end in receiver._receivers if isinstance(end, NixlReceiver)]
    return sum(reader._buffer is not None for end in ends for reader in end._readers.values())


@pytest.mark.cluster
@pytest.mark.parametrize("kit", ["redis", NIXL, NIXL_CUDA], indirect=True)
async def test_a_receiver_killed_after_its_first_chunk_ends_the_send_by_its_deadline(
    kit: Kit, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = (RedisConnection, "_go_on") if kit.transport == "redis" else (NixlLink, "_piece_read")
    peer, sender = await kit.peer("receive"), kit.sender()
    address = await peer.line()
    await sender.send(to(address), of_bytes(b"x"), memoryview(b"x"), timeout_s=30)  # it is connected
    assert await peer.line() == "ok"
    pause = Pause(monkeypatch, owner, name)
    data = memoryview(bytes(64 * MIB))
    sending = asyncio.create_task(sender.send(to(address), of_bytes(data), data, timeout_s=15.0))
    async with asyncio.timeout(60):
        await pause.reached.wait()
        await peer.kill()
        pause.over.set()
        with pytest.raises(TriptychError) as caught:
            await sending
    assert caught.value.info.code == "unavailable"
    assert await keys_without_expiry(redis) == []
    receiver = kit.receiver()
    assert (await transfer(sender, receiver, of_bytes(b"y"), memoryview(b"y"))).data == b"y"


async def test_a_reader_that_trickles_gets_everything_and_holds_up_its_own_sender_only(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a tensor whenever another receiver has had one; what it leaves waits at the sender, not in memory."""
    for module in (shm_transport, cuda_transport):
        monkeypatch.setattr(module, "ARENA_BYTES", 4 * MIB)
    sender, slow, healthy = kit.sender(), kit.receiver(), kit.receiver()
    data, count, sent = memoryview(os.urandom(MIB)), 16, 0

    async def send_all() -> None:
        nonlocal sent
        for part in range(count):
            await sender.send(to(slow.address), of_bytes(data, part=part), data, timeout_s=30)
            sent += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(send_all())
        for part in range(count):
            (await transfer(sender, healthy, of_bytes(data), data)).release()
            assert sent - part <= 5 or kit.transport == "zmq"  # which counts tensors, not bytes
            received = await receive(slow)
            assert (received.header.part, received.fault) == (part, None)
            received.release()


@pytest.mark.parametrize("kit", ["zmq"], indirect=True)
async def test_a_wire_that_stalls_amid_a_tensor_holds_up_nobody_else(kit: Kit) -> None:
    sender, far, near = kit.sender(), kit.receiver(), kit.receiver()
    data = memoryview(os.urandom(16 * MIB))
    async with Relay(far.address) as wire:
        await sender.send(to(wire.address), of_bytes(b"x"), memoryview(b"x"), timeout_s=10)
        (await far.receive()).release()
        receiving = asyncio.create_task(receive(far))
        wire.flowing.clear()
        await sender.send(to(wire.address), of_bytes(data), data, timeout_s=10)
        for _ in range(5):
            (await transfer(sender, near, of_bytes(data[:MIB]), data[:MIB])).release()
        assert wire.num_passed < MIB
        assert not receiving.done()
        wire.flowing.set()
        async with asyncio.timeout(20):
            received = await receiving
        assert (received.data, received.fault) == (data, None)
        assert wire.num_accepted == 1


@pytest.mark.parametrize("kit", [NIXL, NIXL_CUDA], indirect=True)
async def test_a_pair_that_has_been_silent_for_long_meets_again(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the receiver remembers a sender, which is reminded before the next tensor."""
    sender, receiver = kit.sender(), kit.receiver()
    (await transfer(sender, receiver, of_bytes(b"x"), memoryview(b"x"))).release()
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 2 * FORGET_S)
    for _ in range(2):
        assert (await transfer(sender, receiver, of_bytes(b"y"), memoryview(b"y"))).data == b"y"


async def test_a_pair_of_processes_keeps_its_connection(kit: Kit, redis: Redis) -> None:
    """Counted where the kernel has them: whatever number of tensors, no other sockets than after the first ones."""
    sender, receiver = kit.sender(), kit.receiver()
    before = sockets()
    data = memoryview(os.urandom(10_000))

    async def send(count: int) -> None:
        for _ in range(count):
            (await transfer(sender, receiver, of_bytes(data), data)).release()

    await send(3)
    made = sockets() - before
    await send(20)
    more = 1 if kit.transport == "redis" else 0  # its client has a pool; what is left is removed beside what is sent
    assert made <= sockets() - before
    assert len(sockets() - before - made) <= more
    both_ends = {"zmq": 2, "shm": 2, "cuda": 2}.get(kit.transport)
    assert both_ends in (None, len(made)), "one connection, both ends of which are here"


@pytest.mark.parametrize("kit", ["zmq", NIXL], indirect=True)
async def test_the_kernel_looks_after_a_peer_whose_host_vanishes(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it keeps an idle connection for two hours, and one with bytes under way for a quarter of an hour."""
    made: list[zmq.Socket[bytes]] = []
    make = zmq.asyncio.Context.socket

    def note(*args: Any, **options: Any) -> zmq.Socket[bytes]:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(zmq.asyncio.Context, "socket", note)
    data = memoryview(bytes(2**16))
    await transfer(kit.sender(), kit.receiver(), of_bytes(data), data)
    ends = {socket.type: socket for socket in made if socket.type in (zmq.ROUTER, zmq.DEALER)}
    assert set(ends) == {zmq.ROUTER, zmq.DEALER}
    for end in ends.values():
        assert end.getsockopt(zmq.TCP_KEEPALIVE) == 1
        limits = (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT)
        idle_s, interval_s, probes = map(end.getsockopt, limits)
        assert 0 < idle_s + interval_s * probes <= 30
        assert min(idle_s, interval_s, probes) > 0
    assert ends[zmq.DEALER].getsockopt(zmq.CONNECT_TIMEOUT) == 2000
    assert ends[zmq.DEALER].getsockopt(zmq.TCP_MAXRT) == 60_000
