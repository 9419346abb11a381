"""The other side of a transport in a process of its own, to be stopped and killed.

python -m tests.broker.transports.transport_peer receive|hold TRANSPORT BROKER (prints its address, a line per tensor)
python -m tests.broker.transports.transport_peer send TRANSPORT BROKER ADDRESS MIB [TIMEOUT_S] (a line per tensor)
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import zmq.asyncio

from broker.cluster.redis_client import connect
from broker.transports.tensors import ReceivedTensor
from common.messages import TensorHeader
from tests.broker.conftest import make_record
from tests.broker.transports.device_ends import make_receiver, make_sender

MAX_BYTES = 2**30


async def receive(transport: Any, broker: str, *, hold: bool) -> None:
    receiver = make_receiver(zmq.asyncio.Context(), transport, connect(broker), MAX_BYTES)
    print(receiver.address, flush=True)
    held: list[ReceivedTensor] = []
    while True:
        received = await receiver.receive()
        fault = await received.verify()
        if hold:
            held.append(received)
        else:
            received.release()
        print(fault or "ok", flush=True)


async def send(transport: Any, broker: str, address: str, mib: int, timeout_s: float = 5.0) -> None:
    sender = make_sender(zmq.asyncio.Context(), transport, connect(broker))
    record = make_record("d0", "prefill_decode", tensor_address=address)
    header = TensorHeader("r", 0, 0, "peer", 1, [mib * 2**20], "uint8", mib * 2**20)
    data = memoryview(bytes(mib * 2**20))
    while True:
        await sender.send(record, header, data, timeout_s)
        print("sent", flush=True)


if __name__ == "__main__":
    mode, transport, broker, *rest = sys.argv[1:]
    if mode == "send":
        asyncio.run(send(transport, broker, rest[0], int(rest[1]), *map(float, rest[2:])))
    else:
        asyncio.run(receive(transport, broker, hold=mode == "hold"))
