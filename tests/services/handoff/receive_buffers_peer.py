"""A process whose tensors land on a GPU, or on what stands for one.

python -m tests.services.handoff.receive_buffers_peer fake|cuda TRANSPORT

prints its address, then for each tensor its device and its checksum
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch
import zmq.asyncio

from broker.handoff.sender import key_of
from broker.transports.factory import TransportContext
from broker.transports.tensors import TensorReceiver
from common.hashing import checksum
from services.handoff.payloads import bytes_of, open_cuda
from services.handoff.receive_buffers import DeviceReceiveBuffers
from tests.broker.transports.fake_cuda import FakeCuda


async def main(kind: str, transport: Any) -> None:
    device = torch.device("cuda" if kind == "cuda" else "cpu")
    cuda = open_cuda("cuda") if kind == "cuda" else FakeCuda()
    assert cuda is not None
    receiver = TensorReceiver(TransportContext(zmq.asyncio.Context(), transport=transport, cuda=cuda), max_bytes=2**28)
    landing = DeviceReceiveBuffers(cuda, device)
    print(receiver.address, flush=True)
    while True:
        received = await receiver.receive()
        landed = await landing.receive(key_of(received.header), received)
        received.release()
        if isinstance(landed, str):
            print(landed, flush=True)
        else:
            print(landed.device.type, checksum(bytes_of(landed.cpu())), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
