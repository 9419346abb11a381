"""Memory of a GPU between processes, over a fake CUDA that keeps to the order of streams and to nothing beyond it."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import socket as Socket

import pytest

from broker.transports.base import QUEUE_TENSORS, Unreachable
from broker.transports.cuda import sender as cuda_transport
from broker.transports.cuda.arena import DeviceArena
from broker.transports.cuda.receiver import CudaReceiver
from broker.transports.cuda.runtime import HANDLE_BYTES, CudaError
from broker.transports.cuda.sender import CudaConnection, CudaSender
from broker.transports.cuda.wire import ArenaHello
from broker.transports.linked import packets
from broker.transports.linked import sender as linked
from broker.transports.linked.wire import Announce, Release, Welcome, for_sender
from broker.transports.payload import DeviceBuffer
from broker.transports.received import ReceivedTensor
from common.errors import TriptychError
from common.messages import encode
from tests.broker.transports.fake_cuda import GARBAGE, FakeCuda
from tests.broker.transports.transport_kit import of_bytes
from tests.eventually import eventually

MIB = 2**20


@dataclass
class Gpu:
    """One process's GPU and its ends, with an arena of 4 MiB: 2 MiB for each receiver."""

    cuda: FakeCuda
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.sender = CudaSender(self.cuda)
        self.receiver = self.new_receiver()
        self.connections: list[CudaConnection] = []

    def new_receiver(self, max_bytes: int = 2**28) -> CudaReceiver:
        return CudaReceiver(self.cuda, lambda _: self.arrived.set(), max_bytes=max_bytes)

    def connect(self, address: str) -> CudaConnection:
        self.connections.append(CudaConnection(self.sender, address))
        return self.connections[-1]

    async def send(self, connection: CudaConnection, data: bytes | DeviceBuffer, timeout_s: float = 20) -> None:
        buffer = self.cuda.upload(data) if isinstance(data, bytes) else data
        await connection.send(of_bytes(bytes(buffer.nbytes)), buffer, timeout_s)

    async def take(self, receiver: CudaReceiver | None = None) -> ReceivedTensor:
        async with asyncio.timeout(20):
            while (received := (receiver or self.receiver).pop()) is None:
                self.arrived.clear()
                await self.arrived.wait()
        return received

    def bytes_of(self, received: ReceivedTensor) -> bytes:
        """Copied out on a stream that is waited for, as a receiver has to."""
        stream = self.cuda.make_stream()
        assert isinstance(received.data, DeviceBuffer)
        target = self.cuda.upload(bytes(received.data.nbytes))
        self.cuda.copy(target.pointer, received.data.pointer, target.nbytes, stream)
        self.cuda.synchronize(stream)
        self.cuda.destroy_stream(stream)
        return self.cuda.read(target)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.sender.close()
        self.receiver.close()


@pytest.fixture(autouse=True)
def _small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_transport, "ARENA_BYTES", 4 * MIB)


@pytest.fixture
async def one() -> AsyncIterator[Gpu]:
    async with gpu() as made:
        yield made


@pytest.fixture
async def other() -> AsyncIterator[Gpu]:
    """A second process's, on the same device."""
    async with gpu() as made:
        yield made


@asynccontextmanager
async def gpu(device_id: str = "0000:01:00.0", peers: tuple[str, ...] = ()) -> AsyncIterator[Gpu]:
    made = Gpu(FakeCuda(device_id, peers))
    try:
        yield made
    finally:
        made.close()


async def transfer(source: Gpu, target: Gpu, data: bytes, connection: CudaConnection | None = None) -> ReceivedTensor:
    await source.send(connection or source.connect(target.receiver.address), data)
    return await target.take()


async def times_out(source: Gpu, connection: CudaConnection, size: int) -> bool:
    with pytest.raises(TriptychError, match="took none within") as caught:
        await source.send(connection, bytes(size), timeout_s=0.1)
    return caught.value.info.code == "unavailable"


# --- order


async def test_what_has_come_is_there_only_once_its_copy_has_been_waited_for(one: Gpu, other: Gpu) -> None:
    """What the fake is for: a wait that is left out shows."""
    received, data = await transfer(one, other, b"here it is"), b"here it is"
    target, stream = other.cuda.upload(bytes(10)), other.cuda.make_stream()
    other.cuda.copy(target.pointer, received.data.pointer, 10, stream)  # type: ignore[union-attr]
    assert other.cuda.read(target) == bytes([GARBAGE]) * 10
    other.cuda.synchronize(stream)
    assert other.cuda.read(target) == data
    other.cuda.destroy_stream(stream)


async def test_a_tensor_is_announced_when_it_is_there_and_not_before(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, data = one.connect(other.receiver.address), os.urandom(MIB)
    assert other.bytes_of(await transfer(one, other, data[:10], connection)) == data[:10]
    told: list[bytes] = []
    send = packets.PacketSocket.send

    async def look(self: packets.PacketSocket, packet: bytes, *fds: object) -> None:
        told.append(packet)
        await send(self, packet)

    def waits_not(stream: int) -> None:
        assert not told
        type(one.cuda).synchronize(one.cuda, stream)

    monkeypatch.setattr(packets.PacketSocket, "send", look)
    monkeypatch.setattr(one.cuda, "synchronize", waits_not)
    await one.send(connection, data)
    assert len(told) == 1


# --- room


async def test_room_goes_back_by_release_or_with_the_buffer(one: Gpu, other: Gpu) -> None:
    connection = one.connect(other.receiver.address)
    held = [await transfer(one, other, bytes(MIB), connection) for _ in range(2)]
    assert await times_out(one, connection, MIB)
    held[0].release()
    held[0].release()
    held.append(await transfer(one, other, bytes(MIB), connection))
    assert await times_out(one, connection, MIB)
    del held[1]
    await transfer(one, other, bytes(MIB), connection)


async def test_one_receiver_that_releases_nothing_leaves_room_for_others(one: Gpu, other: Gpu) -> None:
    stuck, healthy = one.connect(other.receiver.address), other.new_receiver()
    held = [await transfer(one, other, bytes(MIB), stuck) for _ in range(2)]
    waiting = asyncio.create_task(one.send(stuck, bytes(MIB), timeout_s=60))
    connection = one.connect(healthy.address)
    for number in range(5):
        await one.send(connection, bytes([number]) * MIB)
        received = await other.take(healthy)
        assert other.bytes_of(received) == bytes([number]) * MIB
        received.release()
    assert not waiting.done()
    held[0].release()
    await waiting
    healthy.close()


async def test_no_more_tensors_are_on_their_way_than_may_be(one: Gpu, other: Gpu) -> None:
    connection = one.connect(other.receiver.address)
    held = [await transfer(one, other, b"", connection) for _ in range(QUEUE_TENSORS)]
    assert await times_out(one, connection, 0)
    held.pop().release()
    await transfer(one, other, b"x", connection)


async def test_a_send_that_is_cancelled_amid_its_copy_gives_its_room_back_and_damages_nothing(
    one: Gpu, other: Gpu
) -> None:
    connection = one.connect(other.receiver.address)
    held = await transfer(one, other, b"kept" * 1000, connection)
    for _ in range(5):
        sending = asyncio.create_task(one.send(connection, os.urandom(MIB)))
        for _ in range(3):
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        while (late := other.receiver.pop()) is not None:  # it was too late to cancel it
            late.release()
    data = os.urandom(2 * MIB - 8192)
    assert other.bytes_of(await transfer(one, other, data, connection)) == data
    assert other.bytes_of(held) == b"kept" * 1000


async def test_a_copy_that_begins_when_its_send_has_been_cancelled_writes_over_nobody(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its thread has waited for another one's copy: its room is not lent again before."""
    connection = one.connect(other.receiver.address)
    (await transfer(one, other, b"connected", connection)).release()
    write, waiting, going_on, written = DeviceArena.write, threading.Event(), threading.Event(), threading.Event()

    def late(arena: DeviceArena, offset: int, data: DeviceBuffer | bytes) -> None:
        if isinstance(data, DeviceBuffer) and data.nbytes == MIB:
            waiting.set()
            going_on.wait(20)
            write(arena, offset, data)
            written.set()
        else:
            write(arena, offset, data)

    monkeypatch.setattr(DeviceArena, "write", late)
    sending = asyncio.create_task(one.send(connection, b"A" * MIB))
    assert await asyncio.to_thread(waiting.wait, 20)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    received = await transfer(one, other, b"B" * 1000, connection)
    going_on.set()
    assert await asyncio.to_thread(written.wait, 20)
    assert other.bytes_of(received) == b"B" * 1000
    received.release()
    await transfer(one, other, bytes(2 * MIB), connection)  # all of its room is free again


async def test_what_is_larger_than_a_receivers_part_of_the_arena_goes_another_way(one: Gpu, other: Gpu) -> None:
    connection = one.connect(other.receiver.address)
    assert connection.carries(2 * MIB)
    assert not connection.carries(2 * MIB + 1)
    with pytest.raises(TriptychError, match="takes 100 at most"):
        await one.send(one.connect(other.new_receiver(max_bytes=100).address), bytes(101))


# --- who can


async def test_a_gpu_that_reads_its_peers_memory_takes_tensors_from_it() -> None:
    async with gpu("0000:01:00.0") as first, gpu("0000:02:00.0", peers=("0000:01:00.0",)) as second:
        assert second.bytes_of(await transfer(first, second, b"across")) == b"across"


async def test_a_gpu_that_cannot_read_the_other_is_no_way(one: Gpu) -> None:
    async with gpu("0000:02:00.0") as stranger:
        with pytest.raises(Unreachable):
            await transfer(one, stranger, b"x")
        assert stranger.receiver.num_invalid == 1


async def test_another_host_and_a_name_that_is_not_there_are_no_way(one: Gpu, other: Gpu) -> None:
    scheme, _, place = other.receiver.address.partition("://")
    host, _, name = place.partition("/")
    for address in (f"{scheme}://00000000-{host[9:]}/{name}", f"{scheme}://{host}/{name[::-1]}"):
        with pytest.raises(Unreachable):
            await one.send(one.connect(address), b"x")


async def test_another_user_is_refused(one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets.os, "geteuid", lambda: 4711)
    with pytest.raises(Unreachable):
        await one.send(one.connect(other.receiver.address), b"x")
    assert other.receiver.num_invalid == 1


async def test_a_receiver_that_reads_other_memory_than_the_senders_is_no_way(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a handle may lead astray between containers: it is found out by doing."""
    elsewhere = other.cuda.allocate(4 * MIB)
    monkeypatch.setattr(other.cuda, "open", lambda handle: elsewhere)
    monkeypatch.setattr(other.cuda, "close", lambda pointer: None)
    with pytest.raises(Unreachable):
        await one.send(one.connect(other.receiver.address), b"x")
    other.cuda.free(elsewhere)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Socket, str]]:
    """A receiver that says nothing, and its name; a handshake waits for it for 0.05 s."""
    monkeypatch.setattr(linked, "HANDSHAKE_S", 0.05)
    name = f"triptych-test-{secrets.token_hex(8)}"
    with packets.listen(name) as listening:
        yield listening, name


def _at(other: Gpu, name: str) -> str:
    """The address of another receiver beside `other`."""
    return other.receiver.address.rpartition("/")[0] + f"/{name}"


async def test_a_receiver_that_says_nothing_is_no_way_after_a_while(
    one: Gpu, other: Gpu, silent: tuple[Socket, str]
) -> None:
    with pytest.raises(Unreachable, match=r"no answer within 0\.05 s"):
        await one.send(one.connect(_at(other, silent[1])), b"x")


async def test_sends_that_wait_for_a_receiver_that_says_nothing_fail_with_the_first_one(
    one: Gpu, other: Gpu, silent: tuple[Socket, str]
) -> None:
    """And not one after the other, each after as long a wait; what is sent later tries again."""
    listening, name = silent
    connection = one.connect(_at(other, name))
    for _ in range(2):
        failed = await asyncio.gather(*(one.send(connection, b"x") for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in failed] == 5 * [Unreachable]
        listening.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listening.accept()


async def test_receivers_that_say_nothing_are_waited_for_side_by_side(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked, "HANDSHAKE_S", 60.0)
    place, loop = other.receiver.address.rpartition("/")[0], asyncio.get_running_loop()
    names = [f"triptych-test-{secrets.token_hex(8)}" for _ in range(3)]
    silent = [packets.listen(name) for name in names]
    sending = [asyncio.create_task(one.send(one.connect(f"{place}/{name}"), b"x", timeout_s=60)) for name in names]
    connected = [(await asyncio.wait_for(loop.sock_accept(listening), 20))[0] for listening in silent]
    assert not any(task.done() for task in sending)
    for socket in (*connected, *silent):
        socket.close()
    failed = await asyncio.gather(*sending, return_exceptions=True)
    assert [type(error) for error in failed] == 3 * [Unreachable]


async def test_a_closed_connection_opens_no_other_link(one: Gpu, other: Gpu) -> None:
    connection = one.connect(other.receiver.address)
    connection.close()
    with pytest.raises(TriptychError, match="is closed"):
        await one.send(connection, b"x")


async def test_a_gpu_without_room_for_the_arena_is_no_way(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(num_bytes: int) -> int:
        raise CudaError("cudaMalloc: out of memory (error 2)")

    buffer = one.cuda.upload(b"x")
    monkeypatch.setattr(one.cuda, "allocate", full)
    with pytest.raises(Unreachable, match="out of memory"):
        await one.send(one.connect(other.receiver.address), buffer)


async def test_an_arena_that_takes_longer_than_its_first_send_serves_the_next_one(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, made, allocate = threading.Event(), list[int](), one.cuda.allocate

    def slowly(num_bytes: int) -> int:
        if num_bytes == 4 * MIB:
            going_on.wait(20)
            made.append(num_bytes)
        return allocate(num_bytes)

    monkeypatch.setattr(one.cuda, "allocate", slowly)
    connection = one.connect(other.receiver.address)
    with pytest.raises(TriptychError, match="took none within"):
        await one.send(connection, b"x", timeout_s=0.05)
    going_on.set()
    assert other.bytes_of(await transfer(one, other, b"y", connection)) == b"y"
    assert len(made) == 1
    one.close()
    other.close()
    await eventually(lambda: one.cuda.num_held == 0)


async def test_an_arena_that_is_made_while_its_sender_closes_is_given_back(
    one: Gpu, other: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, making = one.cuda.upload(b"x"), threading.Event()
    monkeypatch.setattr(one.cuda, "export", lambda pointer: making.wait(20) and bytes(HANDLE_BYTES))
    sending = asyncio.create_task(one.send(one.connect(other.receiver.address), buffer))
    await eventually(lambda: one.cuda.num_held == 3)
    one.close()
    making.set()
    with pytest.raises(TriptychError):
        await sending
    del buffer, sending
    await eventually(lambda: one.cuda.num_held == 0)


# --- ends


async def test_a_tensor_outlives_its_sender_and_then_everything_is_given_back(one: Gpu, other: Gpu) -> None:
    data = os.urandom(MIB)
    received = await transfer(one, other, data)
    one.close()
    assert other.bytes_of(received) == data
    other.close()
    assert other.bytes_of(received) == data
    received.release()
    await eventually(lambda: one.cuda.num_held == other.cuda.num_held == 0)


async def test_a_receiver_that_closes_ends_a_waiting_send_at_once_and_the_next_one_is_found(
    one: Gpu, other: Gpu
) -> None:
    connection = one.connect(other.receiver.address)
    held = [await transfer(one, other, bytes(MIB), connection) for _ in range(2)]
    waiting = asyncio.create_task(one.send(connection, bytes(MIB), timeout_s=60))
    await asyncio.sleep(0)
    other.receiver.close()
    with pytest.raises(TriptychError) as caught:
        async with asyncio.timeout(5):
            await waiting
    assert caught.value.info.code == "unavailable"
    assert len(held) == 2
    other.receiver = other.new_receiver()
    assert other.bytes_of(await transfer(one, other, b"again")) == b"again"


async def test_a_closed_sender_sends_no_more(one: Gpu, other: Gpu) -> None:
    connection = one.connect(other.receiver.address)
    await transfer(one, other, b"x", connection)
    one.close()
    with pytest.raises(TriptychError, match="closed"):
        await one.send(connection, b"y")


# --- what a stranger may say


@pytest.fixture
async def stranger(one: Gpu) -> AsyncIterator[_Stranger]:
    made = _Stranger(one)
    yield made
    made.socket.close()
    made.free()


class _Stranger:
    """Connects to a receiver, and says what it likes."""

    def __init__(self, target: Gpu) -> None:
        self.cuda = FakeCuda()
        self.pointer = self.cuda.allocate(MIB)
        self.said: list[object] = []
        self.ended = asyncio.Event()
        name = target.receiver.address.rpartition("/")[2]
        self.socket = packets.PacketSocket(packets.connect(name), self._take, lambda error: self.ended.set())

    def hello(self, **changes: object) -> ArenaHello:
        values = {"handle": self.cuda.export(self.pointer), "arena_bytes": MIB, "nonce_offset": 0}
        return ArenaHello(**{**values, "device_id": self.cuda.device_id, **changes})  # type: ignore[arg-type]

    async def greet(self) -> None:
        self.socket.try_send(encode(self.hello()))
        await eventually(lambda: bool(self.said))
        assert self.said == [Welcome(bytes([GARBAGE]) * 16, 2**28)]

    def free(self) -> None:
        self.cuda.free(self.pointer)

    def _take(self, packet: memoryview, fds: list[int]) -> None:
        self.said.append(for_sender(packet))


def announce(**changes: int) -> bytes:
    return encode(Announce(**{"slot": 0, "offset": 0, "size_bytes": 9, **changes}, header=of_bytes(bytes(9))))


@pytest.mark.parametrize(
    "packet",
    [announce(offset=MIB - 8), announce(size_bytes=MIB + 1), announce(size_bytes=2**40), b"nonsense"],
    ids=["beyond the end", "larger than the arena", "larger than taken", "no message"],
)
async def test_an_announcement_that_cannot_be_ends_the_connection(one: Gpu, stranger: _Stranger, packet: bytes) -> None:
    await stranger.greet()
    stranger.socket.try_send(packet)
    await asyncio.wait_for(stranger.ended.wait(), 10)
    assert one.receiver.num_invalid == 1
    assert one.receiver.pop() is None
    await eventually(lambda: one.cuda.num_held == 0)


async def test_a_slot_that_is_held_is_not_announced_again(one: Gpu, stranger: _Stranger) -> None:
    await stranger.greet()
    stranger.socket.try_send(announce())
    received = await one.take()
    stranger.socket.try_send(announce())
    await asyncio.wait_for(stranger.ended.wait(), 10)
    received.release()
    await eventually(lambda: one.cuda.num_held == 0)


@pytest.mark.parametrize("fault", ["no handle", "nonce beyond the end", "another version", "announced first", "twice"])
async def test_a_greeting_that_is_none_ends_the_connection(one: Gpu, stranger: _Stranger, fault: str) -> None:
    said = {
        "no handle": [encode(stranger.hello(handle=bytes(HANDLE_BYTES)))],
        "nonce beyond the end": [encode(stranger.hello(nonce_offset=MIB - 8))],
        "another version": [encode(stranger.hello(version=99))],
        "announced first": [announce()],
        "twice": [encode(stranger.hello())] * 2,
    }
    for packet in said[fault]:
        stranger.socket.try_send(packet)
    await asyncio.wait_for(stranger.ended.wait(), 10)
    assert one.receiver.num_invalid == 1
    await eventually(lambda: one.cuda.num_held == 0)


@pytest.mark.parametrize("answer", [Release([7]), Welcome(bytes(16), 2**28)])
async def test_a_receiver_that_says_nonsense_is_let_go(one: Gpu, other: Gpu, answer: Release | Welcome) -> None:
    peers: list[packets.PacketSocket] = []

    def accept(connected: object) -> None:
        peers.append(packets.PacketSocket(connected, lambda packet, fds: None, lambda error: None))  # type: ignore[arg-type]
        peers[0].try_send(encode(answer))

    hostile = packets.SameUserListener(accept, lambda: None)
    with pytest.raises(Unreachable):
        await one.send(one.connect(_at(other, hostile.name)), b"x")
    peers[0].close()
    hostile.close()
