"""NIXL between GPUs, over the real library and memory of the host that stands for a GPU's; and what it leaves behind.

What all transports have in common is in test_transports.py and test_transports_peers.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from broker.transports import factory as choice
from broker.transports.factory import TransportContext
from broker.transports.nixl import agent as nixl_agent
from broker.transports.nixl import sender as nixl_sender
from broker.transports.nixl.agent import HostMemory, NixlAgent, NixlError, RegisteredBuffer
from broker.transports.nixl.memory import NixlArena
from broker.transports.nixl.receiver import NixlReceiver
from broker.transports.payload import DeviceBuffer
from broker.transports.received import ReceivedTensor
from broker.transports.tensors import TensorReceiver, TensorSender, addresses_by_scheme
from common.config import Transport
from common.errors import TriptychError
from tests.broker.transports.fake_cuda import FakeCuda
from tests.broker.transports.nixl_exporter import FILLED_WITH
from tests.broker.transports.transport_kit import NEEDS_NIXL, ROOT, of_bytes, to
from tests.eventually import eventually

pytestmark = NEEDS_NIXL
MIB = 2**20
DIRECT, THROUGH_HOST = "nixl+cuda+tcp", "nixl+tcp"


class Ends:
    """A sender and a receiver, each with a GPU of its own; arenas have 4 MiB, of which a tensor takes half at most."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        sends: FakeCuda,
        takes: FakeCuda | None,
        transport: Transport,
        stale_s: float = 30.0,
    ) -> None:
        self.sends, self.takes = sends, takes
        self.sender = TensorSender(TransportContext(context, transport=transport, cuda=sends))
        self.receiver = TensorReceiver(
            TransportContext(context, transport=transport, cuda=takes), max_bytes=2**28, stale_s=stale_s
        )

    async def send(self, data: bytes, timeout_s: float = 30) -> None:
        await self.sender.send(to(self.receiver.address), of_bytes(data), self.sends.upload(data), timeout_s)

    async def transfer(self, data: bytes) -> ReceivedTensor:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(self.send(data))
            receiving = group.create_task(self.receiver.receive())
        return receiving.result()

    def bytes_of(self, received: ReceivedTensor) -> bytes:
        if isinstance(received.data, memoryview):
            return bytes(received.data)
        assert self.takes is not None
        return self.takes.read(received.data)  # nothing is copied any more

    @property
    def num_reserved(self) -> int:
        """Rooms of the receiver's GPU."""
        (end,) = (e for e in self.receiver._receivers if isinstance(e, NixlReceiver) and DIRECT in e.address)
        arena = end.memory
        assert isinstance(arena, NixlArena)
        made = arena._made
        return made[0].num_reserved if made is not None else 0

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture(autouse=True)
def _small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (choice, "RECEIVE_BYTES", 4 * MIB),
        (choice, "MAX_TENSOR_BYTES", 2 * MIB),
        (nixl_sender, "MAX_TENSOR_BYTES", 2 * MIB),
        (nixl_sender, "SEND_BYTES", 4 * MIB),
    ):
        monkeypatch.setattr(module, name, size)


@asynccontextmanager
async def ends(
    context: zmq.asyncio.Context,
    *,
    sends: Literal["DRAM", "VRAM"] = "DRAM",
    takes: Literal["DRAM", "VRAM"] | None = "DRAM",
    transport: Transport = "nixl",
) -> AsyncIterator[Ends]:
    """By what NIXL is told of each GPU's memory: VRAM it finds out not to be such; the receiver may have none."""
    target = None if takes is None else FakeCuda("0000:02:00.0", nixl_kind=takes)
    made = Ends(context, FakeCuda(nixl_kind=sends), target, transport)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
async def both(zmq_context: zmq.asyncio.Context) -> AsyncIterator[Ends]:
    async with ends(zmq_context) as made:
        yield made


# --- which way


async def test_tensors_go_from_gpu_to_gpu_and_nothing_is_left(both: Ends) -> None:
    assert list(addresses_by_scheme(both.receiver.address)) == [THROUGH_HOST, DIRECT]
    for size in (0, 1, MIB, 2 * MIB):
        data = os.urandom(size)
        received = await both.transfer(data)
        assert isinstance(received.data, DeviceBuffer)
        assert (received.fault, received.header.checksum, both.bytes_of(received)) == (None, 0, data)
        received.release()
    assert both.sender.num_sent == {DIRECT: 4}
    await eventually(lambda: both.num_reserved == 0)
    both.close()
    del received
    await eventually(lambda: both.sends.num_held == 0)
    assert both.takes is not None
    await eventually(lambda: both.takes.num_held == 0)


@pytest.mark.parametrize("obstacle", ["sender", "receiver", "no GPU", "too large"])
async def test_what_cannot_go_so_goes_through_the_host_and_that_is_logged_once(
    zmq_context: zmq.asyncio.Context, obstacle: str
) -> None:
    """NIXL itself refuses the memory, as a UCX without CUDA does."""
    takes: Literal["DRAM", "VRAM"] | None = "VRAM" if obstacle == "receiver" else "DRAM"
    async with ends(
        zmq_context,
        sends="VRAM" if obstacle == "sender" else "DRAM",
        takes=None if obstacle == "no GPU" else takes,
    ) as both:
        data = os.urandom(2 * MIB + 1 if obstacle == "too large" else 1000)
        with capture_logs() as logs:
            for number in range(1, 4):
                received = await both.transfer(data)
                assert (await received.verify(), both.bytes_of(received)) == (None, data)
                assert both.sender.num_sent == {THROUGH_HOST: number}
        refused = [line for line in logs if "does not take this GPU's memory" in line["event"]]
        assert len(refused) == (1 if obstacle in ("sender", "receiver") else 0)
        assert len([line for line in logs if "another transport" in line["event"]]) == len(refused)


@pytest.mark.parametrize("rdma", [True, False], ids=["rdma", "no rdma"])
async def test_auto_takes_it_between_hosts_with_rdma(
    zmq_context: zmq.asyncio.Context, rdma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two GPUs cannot read each other, as those of two hosts cannot."""
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda host: rdma)
    async with ends(zmq_context, transport="auto") as both:
        assert (DIRECT in addresses_by_scheme(both.receiver.address)) == rdma
        assert both.bytes_of(await both.transfer(b"far")) == b"far"
        assert both.sender.num_sent == {DIRECT if rdma else "shm+unix": 1}


# --- room


async def test_room_goes_back_by_release_or_with_the_buffer(both: Ends) -> None:
    held = [await both.transfer(os.urandom(2 * MIB)) for _ in range(2)]
    with pytest.raises(TriptychError, match="took none within"):
        await both.send(b"x", timeout_s=0.3)
    kept = both.bytes_of(held[1])
    held[0].release()
    held[0].release()
    third = await both.transfer(b"third")
    assert both.bytes_of(third) == b"third"
    assert both.bytes_of(held[1]) == kept
    held.clear()
    await eventually(lambda: both.num_reserved == 1)


async def test_what_was_given_up_is_never_handed_out_though_its_room_has_other_bytes_now(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver reads a tensor when its sender has given it up and put the next one where it was."""
    (await both.transfer(b"hello")).release()
    read, going_on, waiting = NixlAgent.read, asyncio.Event(), asyncio.Event()

    async def late(agent: NixlAgent, *arguments: object) -> None:
        waiting.set()
        await going_on.wait()
        await read(agent, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NixlAgent, "read", late)
    first = asyncio.create_task(both.send(b"A" * MIB, timeout_s=2.0))
    async with asyncio.timeout(30):
        await waiting.wait()
        with pytest.raises(TriptychError):
            await first
    second = asyncio.create_task(both.send(b"B" * MIB))
    await asyncio.sleep(0.3)
    going_on.set()
    async with asyncio.timeout(30):
        received = await both.receiver.receive()
        await second
    assert both.bytes_of(received) == b"B" * MIB
    assert both.receiver._pop() is None
    assert both.receiver.num_unfinished == 1
    received.release()
    await eventually(lambda: both.num_reserved == 0)


async def test_a_piece_that_is_not_read_in_time_is_given_up_and_the_tensor_goes_another_way(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Ends(
        zmq_context, FakeCuda(nixl_kind="DRAM"), FakeCuda("0000:02:00.0", nixl_kind="DRAM"), "nixl", stale_s=2.0
    )
    try:
        (await both.transfer(b"hello")).release()
        read, num_reads = NixlAgent.read, 0

        async def stuck_at_first(agent: NixlAgent, *arguments: object) -> None:
            nonlocal num_reads
            num_reads += 1
            if num_reads == 1:
                await asyncio.Event().wait()
            await read(agent, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(NixlAgent, "read", stuck_at_first)
        received = await both.transfer(b"through the host")
        assert both.bytes_of(received) == b"through the host"
        assert both.sender.num_sent == {DIRECT: 1, THROUGH_HOST: 1}
        assert both.receiver.num_unfinished == 1
        await eventually(lambda: both.num_reserved == 0)
    finally:
        both.close()


async def test_sends_that_are_cancelled_leave_nothing_and_damage_nothing(both: Ends) -> None:
    held = await both.transfer(b"kept" * 1000)
    for steps in range(12):
        sending = asyncio.create_task(both.send(os.urandom(MIB)))
        for _ in range(steps):
            await asyncio.sleep(0.002)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        while (late := both.receiver._pop()) is not None:  # it was too late to cancel it
            late.release()
    data = os.urandom(2 * MIB)
    received = await both.transfer(data)
    while received.data.nbytes != len(data):
        received.release()
        received = await both.receiver.receive()
    assert both.bytes_of(received) == data
    assert both.bytes_of(held) == b"kept" * 1000
    received.release()
    await eventually(lambda: both.num_reserved == 1)


async def test_a_tensor_outlives_both_ends_and_then_the_device_has_its_memory_back(both: Ends) -> None:
    data = os.urandom(MIB)
    received = await both.transfer(data)
    both.close()
    await asyncio.sleep(0)
    assert both.takes is not None
    assert both.bytes_of(received) == data
    assert both.takes.num_held > 0
    received.release()
    await eventually(lambda: both.takes.num_held == 0)
    await eventually(lambda: both.sends.num_held == 0)


# --- what UCX does after it was told to stop


@pytest.mark.cluster
async def test_a_transfer_that_is_given_up_keeps_its_room_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX writes on when the other side, stopped amid it, comes to life: nobody else may have the room by then."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # by shared memory it would be read without the other side
    command = [sys.executable, "-m", "tests.broker.transports.nixl_exporter", str(16 * MIB)]
    other = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    agent = NixlAgent("127.0.0.1")
    try:
        metadata, address = await exported(other)
        name, memory, freed = agent.add_peer(metadata), HostMemory(agent, 16 * MIB), asyncio.Event()
        room = RegisteredBuffer(memory.where, memory.address, freed.set)
        memory.array[:] = 0
        await agent.read(name, memory.where, address, room, 0, MIB)
        assert memory.array[MIB - 1] == FILLED_WITH
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await agent.read(name, memory.where, address, room, 0, 16 * MIB)
        room.release()
        agent.remove_peer(name)
        assert not freed.is_set()
        assert memory.array[-1] == 0
        other.send_signal(signal.SIGCONT)
        await eventually(lambda: agent.settle() is None and freed.is_set(), timeout_s=30)
        assert memory.array[-1] == FILLED_WITH
        with pytest.raises(NixlError):  # it has been forgotten, now that nothing is read from it
            await agent.read(name, memory.where, address, room, 0, MIB)
    finally:
        agent.close()
        other.kill()
        await other.wait()


async def exported(other: asyncio.subprocess.Process) -> tuple[bytes, int]:
    assert other.stdout is not None
    async with asyncio.timeout(60):
        while not (line := await other.stdout.readline()).startswith(b"exported"):
            assert line
    _, metadata, address = line.decode().split()
    return bytes.fromhex(metadata), int(address)


async def test_a_closed_agent_lets_go_of_all_rooms_and_does_nothing_more() -> None:
    agent = NixlAgent("127.0.0.1")
    memory, freed = HostMemory(agent, MIB), asyncio.Event()
    agent.close()
    agent.close()
    RegisteredBuffer(memory.where, memory.address, freed.set).release()
    assert freed.is_set()
    with pytest.raises(NixlError, match="closed"):
        HostMemory(agent, MIB)
