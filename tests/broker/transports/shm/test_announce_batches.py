"""Small tensors over shared memory that are announced together: whole, in order, as soon as the turn ends, bounded."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from broker.transports.arena import ALIGNMENT_BYTES
from broker.transports.base import QUEUE_TENSORS
from broker.transports.linked import packets
from broker.transports.linked.wire import Announce
from broker.transports.shm import announce_batcher
from broker.transports.shm.sender import ShmLink
from broker.transports.shm.wire import MAX_BATCH, AnnounceBatch, ToReceiver, for_receiver
from broker.transports.tensors import ReceivedTensor, TensorReceiver, TensorSender
from tests.broker.transports.transport_kit import Kit, of_bytes, receive, to, transfer
from tests.eventually import eventually

KIB, MIB = 2**10, 2**20


@pytest.fixture
async def ends(kit: Kit) -> tuple[TensorSender, TensorReceiver]:
    """A sender and a receiver that are connected."""
    sender, receiver = kit.sender(), kit.receiver()
    (await transfer(sender, receiver, of_bytes(b""), memoryview(b""))).release()
    return sender, receiver


class Socket:
    """Sees what is announced; takes nothing while it is `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.announced: list[ToReceiver] = []
        self._sends = packets.PacketSocket.try_send
        monkeypatch.setattr(packets.PacketSocket, "try_send", lambda *call: self._try_send(*call))

    def _try_send(self, end: packets.PacketSocket, packet: bytes, fds: Sequence[int] = ()) -> bool:
        if self.full:
            return False
        if b"release" not in packet:
            self.announced.append(for_receiver(packet))
        return self._sends(end, packet, fds)

    def sizes(self) -> list[int]:
        """How many tensors each announcement was of."""
        return [len(said.headers) if isinstance(said, AnnounceBatch) else 1 for said in self.announced]


@pytest.fixture
def socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Socket:
    return Socket(monkeypatch)


async def send_all(sender: TensorSender, receiver: TensorReceiver, sizes: Sequence[int]) -> list[memoryview]:
    """Send tensors of these sizes one after the other, with nothing else on the loop in between; their bytes."""
    sent = [memoryview(os.urandom(size)) for size in sizes]
    for data in sent:
        await sender.send(to(receiver.address), of_bytes(data), data, timeout_s=20)
    return sent


async def receive_all(receiver: TensorReceiver, count: int) -> list[ReceivedTensor]:
    received = [await receive(receiver) for _ in range(count)]
    assert [tensor.fault for tensor in received] == [None] * count
    return received


Ends = tuple[TensorSender, TensorReceiver]


async def test_what_is_sent_in_one_turn_is_announced_together_but_for_the_first(ends: Ends, socket: Socket) -> None:
    """Odd sizes, none, and more than one announcement holds."""
    sender, receiver = ends
    sent = await send_all(sender, receiver, [7, 0, 100, 13 * KIB + 1, 0, 64 * KIB, *range(MAX_BATCH)])
    received = await receive_all(receiver, len(sent))
    assert [tensor.data for tensor in received] == sent
    assert socket.sizes() == [1, MAX_BATCH, 5]


async def test_a_tensor_that_is_alone_in_its_turn_waits_for_no_other(ends: Ends, socket: Socket) -> None:
    sender, receiver = ends
    for number in range(1, 4):
        await send_all(sender, receiver, [100])
        assert socket.sizes() == [1] * number
        (await receive_all(receiver, 1)).pop().release()  # the loop turns


async def test_a_batch_is_as_large_as_its_room(ends: Ends, socket: Socket, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    third = announce_batcher.SLICE_BYTES // 3 - KIB
    monkeypatch.setattr(announce_batcher, "MAX_BYTES", third)
    sent = await send_all(sender, receiver, [1, third, third, third, third])
    assert [tensor.data for tensor in await receive_all(receiver, 5)] == sent
    assert socket.sizes() == [1, 3, 1]


@pytest.mark.parametrize(
    "large", [announce_batcher.MAX_BYTES + 1, 2 * MIB, 9 * MIB], ids=["at once", "in the arena", "beyond"]
)
async def test_a_larger_tensor_does_not_overtake_the_small_ones_before_it(
    ends: Ends, socket: Socket, large: int
) -> None:
    sender, receiver = ends
    sent = await send_all(sender, receiver, [1, 10, 20, large])
    assert [tensor.data for tensor in await receive_all(receiver, 4)] == sent
    assert socket.sizes()[:3] == [1, 2, 1]


async def test_the_room_of_a_batch_goes_back_when_all_of_it_has_been_released(ends: Ends, kit: Kit) -> None:
    sender, receiver = ends
    await send_all(sender, receiver, [1, *([100] * 5)])
    received = await receive_all(receiver, 6)
    received.pop(0).release()
    while len(received) > 1:
        received.pop().release()
    await eventually(lambda: lent(sender) == 1)
    expected = bytes(received[0].data)
    (await receive_all_of(sender, receiver, 2 * MIB)).release()
    assert received[0].data == expected
    received.pop().release()
    await eventually(lambda: lent(sender) == 0)
    (await receive_all_of(sender, receiver, 4 * MIB)).release()


async def receive_all_of(sender: TensorSender, receiver: TensorReceiver, size: int) -> ReceivedTensor:
    await send_all(sender, receiver, [size])
    return (await receive_all(receiver, 1))[0]


def link_of(sender: TensorSender) -> ShmLink:
    (route,) = sender._routes.values()
    (connection,) = route._connections.values()
    link = getattr(connection, "_link")  # noqa: B009
    assert isinstance(link, ShmLink)
    return link


def lent(sender: TensorSender) -> int:
    """Rooms that the receiver has."""
    return len(link_of(sender)._reserved)


async def test_one_damaged_tensor_of_a_batch_is_one_damaged_tensor(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    announce = announce_batcher.AnnounceBatcher.announce

    def damage_and_announce(ours: announce_batcher.AnnounceBatcher) -> bool:
        if ours._slice is not None:
            ours._slice.memory[ALIGNMENT_BYTES + 3] ^= 0x10  # within the second one
        return announce(ours)

    monkeypatch.setattr(announce_batcher.AnnounceBatcher, "announce", damage_and_announce)
    await send_all(sender, receiver, [1, 10, 20, 30])
    received = [await receive(receiver) for _ in range(4)]
    assert [tensor.fault is None for tensor in received] == [True, True, False, True]


async def test_a_receiver_that_does_not_read_loses_nothing_and_gets_all_in_order(ends: Ends, socket: Socket) -> None:
    """What its socket does not take waits; what follows does not pass by."""
    sender, receiver = ends
    sent = await send_all(sender, receiver, [1])
    socket.full = True
    sent += await send_all(sender, receiver, [10] * MAX_BATCH)
    assert socket.sizes() == [1]
    socket.full = False
    sent += await send_all(sender, receiver, [20, 2 * MIB, 30])
    assert [tensor.data for tensor in await receive_all(receiver, len(sent))] == sent
    assert socket.sizes()[:3] == [1, MAX_BATCH, 1]


async def test_more_messages_than_may_be_on_their_way_wait_for_a_release(ends: Ends) -> None:
    sender, receiver = ends
    count = 4 * 2 * MAX_BATCH  # as many as rooms of an arena of 4 MiB hold, and more
    sent = [memoryview(os.urandom(64 * KIB)) for _ in range(count)]
    held: list[ReceivedTensor] = []
    for data in sent[: count // 2]:
        await sender.send(to(receiver.address), of_bytes(data), data, timeout_s=20)
        assert lent(sender) <= QUEUE_TENSORS
    held = await receive_all(receiver, count // 2)
    assert [tensor.data for tensor in held] == sent[: count // 2]
    while held:
        held.pop().release()
    for data in sent[count // 2 :]:
        await sender.send(to(receiver.address), of_bytes(data), data, timeout_s=20)
    assert [tensor.data for tensor in await receive_all(receiver, count // 2)] == sent[count // 2 :]


async def test_what_has_been_sent_when_a_sender_closes_arrives(ends: Ends) -> None:
    sender, receiver = ends
    sent = await send_all(sender, receiver, [1, 10, 20])
    sender.close()
    assert [tensor.data for tensor in await receive_all(receiver, 3)] == sent
    assert receiver.num_invalid == 0


async def test_a_tensor_that_the_receiver_does_not_take_is_refused_as_ever(kit: Kit) -> None:
    sender, receiver = kit.sender(), kit.receiver(max_bytes=1000)
    (await transfer(sender, receiver, of_bytes(b""), memoryview(b""))).release()
    await send_all(sender, receiver, [1, 1000])
    with pytest.raises(Exception, match="the receiver takes 1000 at most"):
        await send_all(sender, receiver, [1001])
    assert len(await receive_all(receiver, 2)) == 2


async def test_batches_hold_what_is_worth_it_only(ends: Ends, socket: Socket) -> None:
    sender, receiver = ends
    await send_all(sender, receiver, [announce_batcher.MAX_BYTES + 1] * 3)
    await receive_all(receiver, 3)
    assert all(isinstance(said, Announce) for said in socket.announced)
