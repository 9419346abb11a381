"""Bytes that change on their way: found by whoever receives them, and sent again by the handoff, until they are right.

Each transport is damaged where its bytes are in transit: in the arena, on the wire, in the broker's list, in the memory
that is registered for others to read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from broker.handoff.channels import ChannelSender, Delivery
from broker.handoff.sender import HandoffSender, key_of
from broker.transports.nixl.sender import NixlConnection
from broker.transports.nixl.wire import ReadablePiece, ToReceiver
from broker.transports.redis.wire import Parcel
from broker.transports.shm.segment import ArenaSlice
from broker.transports.shm.sender import ShmLink
from common.messages import Grant, InputLayout, Offer, Receipt, TensorHeader
from tests.broker.conftest import make_record, running
from tests.broker.transports.relay import Relay
from tests.broker.transports.transport_kit import NIXL, Kit, kit_of, receive, to
from tests.eventually import eventually

SIZE = 5 * 2**20 + 3
PLACE = 2**20 + 4711
"""The byte that changes, once."""
Wire = Callable[[str], Awaitable[str]]
"""From the receiver's address to the one that the sender is told."""


@pytest.fixture(params=["shm", "zmq", "redis", NIXL])
async def kit(request: pytest.FixtureRequest, redis: Redis, broker_url: str) -> AsyncIterator[Kit]:
    async with kit_of(request.param, redis, broker_url) as kit:
        yield kit


@pytest.fixture
async def damaged_wire(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    async with AsyncExitStack() as stack:

        async def lead(address: str) -> str:
            if kit.transport == "zmq":
                return (await stack.enter_async_context(Relay(address, damaged=PLACE))).address
            DAMAGES[kit.transport](monkeypatch)
            return address

        yield lead


def damage_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    announce, left = ShmLink.announce, [PLACE]

    async def damage_and_announce(link: ShmLink, room: ArenaSlice, header: TensorHeader) -> None:
        if left:
            room.memory[left.pop()] ^= 0x10
        await announce(link, room, header)

    monkeypatch.setattr(ShmLink, "announce", damage_and_announce)


def damage_list(monkeypatch: pytest.MonkeyPatch) -> None:
    push, left = Parcel.push, [PLACE]

    async def push_damaged(parcel: Parcel, part: int | str, value: memoryview) -> None:
        entry = bytearray(value)
        if left and len(entry) > PLACE:
            entry[left.pop()] ^= 0x10
        await push(parcel, part, bytes(entry))

    monkeypatch.setattr(Parcel, "push", push_damaged)


def damage_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    say, left = NixlConnection._send_message, [PLACE]

    async def damage_and_say(connection: NixlConnection, message: ToReceiver) -> None:
        if isinstance(message, ReadablePiece) and left:
            assert connection._memory is not None
            connection._memory.array[left.pop()] ^= 0x10
        await say(connection, message)

    monkeypatch.setattr(NixlConnection, "_send_message", damage_and_say)


DAMAGES = {"shm": damage_arena, "redis": damage_list, "nixl": damage_registered_memory}


async def test_what_is_damaged_on_its_way_is_sent_again_and_arrives_whole(
    kit: Kit, redis: Redis, damaged_wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 60.0)  # what comes twice comes because it was damaged
    data, receiver, channels = memoryview(os.urandom(SIZE)), kit.receiver(), ChannelSender(redis, "c")
    handoffs = HandoffSender(channels, kit.sender(), timeout_s=20.0)
    handoffs.own = make_record("e0")
    offer = Offer("r", 0, 0, "h", "image", [SIZE], "uint8", SIZE, InputLayout(4, [(7, 4)]), "e0", time.monotonic() + 20)
    address = await damaged_wire(receiver.address)
    async with running(channels.run()):
        offering = asyncio.create_task(handoffs.offer(offer, to(address)))
        await eventually(lambda: handoffs.num_open == 1)
        handoffs.handle(Delivery(b"stream", b"1-0", Grant(*key_of(offer), "granted"), False))
        delivering = asyncio.create_task(handoffs.deliver(await offering, [SIZE], "uint8", data))
        faults = []
        while None not in faults:
            received = await receive(receiver)
            faults.append(received.fault)
            arrived = bytes(received.data)
            received.release()
            receipt = Receipt(*key_of(offer), "corrupt" if faults[-1] else "stored")
            handoffs.handle(Delivery(b"stream", b"1-0", receipt, False))
        await delivering
    assert len(faults) == 2
    assert "damaged" in str(faults[0])
    assert arrived == data
    assert handoffs.outcomes == {"sent_again": 1, "stored": 1}
