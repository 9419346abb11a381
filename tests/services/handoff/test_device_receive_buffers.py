"""Tensors from one process's GPU to another's, by CUDA or NIXL: where there is one, and by what stands for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import torch
import zmq.asyncio

from broker.transports.cuda.sender import ARENA_BYTES, LINK_SHARE
from broker.transports.factory import TransportContext
from broker.transports.payload import Payload
from broker.transports.tensors import TensorSender
from common.config import Transport
from common.hashing import checksum
from common.messages import TensorHeader
from services.handoff.payloads import bytes_of, open_cuda, payload_of
from tests.broker.transports.cuda import cuda_ipc
from tests.broker.transports.fake_cuda import FakeCuda
from tests.broker.transports.transport_kit import NEEDS_NIXL, ROOT, Peer, to

pytestmark = pytest.mark.cluster
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
SHAPES = ([1, 1], [257, 1280], [1500, 1024], [4, 0], [3, 333])


GPU = [NO_GPU, pytest.mark.gpu]
SCHEMES = {"auto": ("cuda+unix", "shm+unix"), "nixl": ("nixl+cuda+tcp", "nixl+tcp")}
"""By which it goes from GPU to GPU, and through the host."""


@dataclass
class Sending:
    """The sending process, which is this one, and the other one's address."""

    kind: str
    transport: Transport
    sender: TensorSender
    peer: Peer
    address: str
    fake: FakeCuda

    async def send(self, values: torch.Tensor) -> None:
        """Send a tensor that lies on the GPU."""
        payload: Payload
        if self.kind == "fake":
            payload = self.fake.upload(bytes_of(values))
        else:
            payload = payload_of(values.cuda())  # a copy from pageable memory is waited for
        dtype = str(values.dtype).removeprefix("torch.")
        header = TensorHeader("r", 0, 0, "e0", 1, list(values.shape), dtype, values.nbytes)
        await self.sender.send(to(self.address), header, payload, 20.0)

    def expected(self, values: torch.Tensor) -> str:
        """What the other process says once it has landed there whole."""
        return f"{'cuda' if self.kind == 'cuda' else 'cpu'} {checksum(bytes_of(values))}"


@pytest.fixture(
    params=[
        pytest.param(("fake", "auto"), id="fake"),
        pytest.param(("cuda", "auto"), id="cuda", marks=GPU),
        pytest.param(("fake", "nixl"), id="fake-nixl", marks=NEEDS_NIXL),
        pytest.param(("cuda", "nixl"), id="cuda-nixl", marks=[*GPU, NEEDS_NIXL]),
    ]
)
async def sending(request: pytest.FixtureRequest, zmq_context: zmq.asyncio.Context) -> AsyncIterator[Sending]:
    kind, transport = request.param
    fault = cuda_ipc.fault() if request.param == ("cuda", "auto") else None
    if fault is not None:
        pytest.skip(fault)
    command = [sys.executable, "-m", "tests.services.handoff.receive_buffers_peer", kind, transport]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    peer, fake = Peer(process), FakeCuda()
    sender = TensorSender(
        TransportContext(zmq_context, transport=transport, cuda=open_cuda("cuda") if kind == "cuda" else fake)
    )
    try:
        yield Sending(kind, transport, sender, peer, await peer.line(), fake)
    finally:
        sender.close()
        await peer.kill()


async def test_tensors_land_whole_one_by_one_many_at_once_and_when_they_are_too_large(sending: Sending) -> None:
    """One test, for the other process takes long to start."""
    for number, shape in enumerate(SHAPES * 3):
        values = torch.randn(shape).to((torch.float32, torch.bfloat16, torch.float16)[number % 3])
        await sending.send(values)
        assert await sending.peer.line() == sending.expected(values)
    tensors = [torch.full((64, 1024), float(number), dtype=torch.bfloat16) for number in range(24)]
    await asyncio.gather(*map(sending.send, tensors))
    landed = [await sending.peer.line() for _ in tensors]
    assert sorted(landed) == sorted(map(sending.expected, tensors))
    direct, through_host = SCHEMES[sending.transport]
    assert sending.sender.num_sent == {direct: 3 * len(SHAPES) + len(tensors)}
    large = torch.randn(ARENA_BYTES // LINK_SHARE // 2 + 1).to(torch.bfloat16)
    await sending.send(large)
    assert await sending.peer.line() == sending.expected(large)
    assert sending.sender.num_sent[through_host] == 1
