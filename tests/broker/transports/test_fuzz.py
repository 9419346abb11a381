"""20,000 hostile inputs through each decoder of the transports' own messages: a message or ValueError, nothing else."""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from broker.transports.cuda import wire as cuda_wire
from broker.transports.cuda.runtime import HANDLE_BYTES
from broker.transports.linked import wire as linked_wire
from broker.transports.nixl import wire as nixl_wire
from broker.transports.redis.wire import Passing, decode_passing
from broker.transports.shm import wire as shm_wire
from broker.transports.zmq import wire as zmq_wire
from common.messages import encode
from tests.security.mutations import SEED, decoded, hostile
from tests.security.real_messages import HEADER
from tests.security.test_curve import resident_bytes

PER_DECODER = 20_000
GROWTH_BYTES = 32 * 2**20

ANNOUNCE = linked_wire.Announce(3, 4096, 49152, HEADER)
WIRES: dict[str, tuple[Callable[[bytes], object], list[object]]] = {
    "shm, receiver": (
        shm_wire.for_receiver,
        [
            shm_wire.Hello(2**27),
            ANNOUNCE,
            shm_wire.AnnounceBatch(3, 4096, [HEADER] * 3),
            shm_wire.PushOffer(3, HEADER),
            shm_wire.Written(3, 2**20),
            shm_wire.PushWithdraw(3),
        ],
    ),
    "shm, sender": (linked_wire.for_sender, [linked_wire.Welcome(bytes(16), 2**30), linked_wire.Release([3, 4])]),
    "cuda, receiver": (
        cuda_wire.for_receiver,
        [cuda_wire.ArenaHello(bytes(HANDLE_BYTES), 2**27, 64, "0000:01:00.0"), ANNOUNCE],
    ),
    "nixl, receiver": (
        nixl_wire.for_receiver,
        [
            nixl_wire.Greeting(bytes(400)),
            nixl_wire.ReadablePiece(1, HEADER, 49152, 0, 49152, 2**47),
            nixl_wire.Complete(1),
            nixl_wire.Goodbye(),
        ],
    ),
    "nixl, sender": (
        nixl_wire.for_sender,
        [
            nixl_wire.ReceiverGreeting(2**30, bytes(16)),
            nixl_wire.Refusal("no memory"),
            nixl_wire.Taken(1, "greet first"),
        ],
    ),
    "zmq, receiver": (zmq_wire.decode_head, [HEADER, zmq_wire.First(HEADER, 49152), zmq_wire.Next(16384, 2**63)]),
    "redis": (decode_passing, [Passing("0f" * 8, 49152, 5.0, HEADER)]),
}


@pytest.mark.parametrize("wire", WIRES)
def test_decoding_gives_a_message_or_a_value_error(wire: str) -> None:
    decode, messages = WIRES[wire]
    kinds, rng, outcomes = tuple(type(message) for message in messages), random.Random(SEED), Counter[str]()
    before = resident_bytes()
    for data in hostile(rng, [encode(message) for message in messages], PER_DECODER):
        outcome = decoded(decode, data, ValueError)
        if isinstance(outcome, ValueError):
            outcomes["error"] += 1
            assert len(str(outcome)) < 1000
        else:
            outcomes["message"] += 1
            assert isinstance(outcome, kinds)
            assert encode(outcome)
            assert math.isfinite(getattr(outcome, "timeout_s", 0.0))
    gc.collect()
    assert resident_bytes() - before < GROWTH_BYTES
    assert min(outcomes["error"], outcomes["message"]) > PER_DECODER / 100  # neither is rare: both are reached
