"""Push buffers by themselves, without a connection: in whatever order things happen to one, it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.transports.linked.wire import Announce
from broker.transports.received import PushTarget, ReceivedTensor
from broker.transports.shm import push_buffer, segment
from broker.transports.shm.push_buffer import PushBuffer, PushBuffers
from broker.transports.shm.wire import PushOffer, PushWithdraw, ToReceiver, Written
from common.hashing import checksum
from common.messages import TensorHeader
from tests.broker.transports.transport_kit import of_bytes


class Busy:
    """Threads that never get to anything."""

    def submit(self, function: Any) -> None: ...

    def shutdown(self, **how: bool) -> None: ...


class Receiver:
    """Hears what is said, unless its ears are full."""

    def __init__(self) -> None:
        self.rooms: dict[int, PushTarget] = {}
        self.received: list[ReceivedTensor] = []
        self.full = False

    def hear(self, message: ToReceiver, fds: Sequence[int]) -> bool:
        if self.full:
            return False
        match message:
            case PushOffer(slot=slot, header=header):
                assert slot not in self.rooms
                memory = segment.open_received(fds[0], header.size_bytes, writable=True)
                self.rooms[slot] = PushTarget(header, memory)
            case Written(slot=slot, num_bytes=num_bytes):
                self.rooms[slot].read_to(num_bytes)
            case PushWithdraw(slot=slot):
                self.rooms.pop(slot).discard()
            case Announce(slot=slot, header=header):
                tensor = self.rooms.pop(slot).complete(header)
                assert tensor is not None
                self.received.append(tensor)
        return True


def test_memory_that_was_not_touched_in_time_is_not_waited_for() -> None:
    pushes = PushBuffers(lambda message, fds: True)
    pushes._touching.shutdown()
    pushes._touching = Busy()
    given = pushes.reserve(0, of_bytes(memoryview(bytes(1000))))
    assert given is not None
    given.send(memoryview(bytes(1000)))
    assert given.sent_s is None


ACTIONS = ("reserve", "touch", "send", "discard", "full", "not full")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), max_size=40))
def test_in_whatever_order_each_push_ends_once(actions: list[tuple[str, int]]) -> None:
    """Announced and received whole, or withdrawn, as soon as the receiver hears again; and its slot is free again."""
    receiver = Receiver()
    pushes = PushBuffers(receiver.hear)
    pushes._touching.shutdown()
    pushes._touching = Busy()
    out: list[PushBuffer] = []
    num_left = 0
    for slot, (action, number) in enumerate(actions):
        if action == "reserve":
            made = pushes.reserve(slot, TensorHeader("r", slot, 0, "e0", 1, [3000], "uint8", 3000))
            assert made is not None or receiver.full or len(receiver.rooms) >= push_buffer.MAX_PUSHES
            out += [made] if made is not None else []
        elif action in ("full", "not full"):
            receiver.full = action == "full"
        elif out and action == "send":
            given = out[number % len(out)]
            before = given.sent_s
            given.send(np.full(3000, given._slot, np.uint8).data)
            num_left += before is None and given.sent_s is not None
        elif out:
            getattr(out[number % len(out)], action)()
    receiver.full = False
    for given in out:
        given.discard()
    assert pushes.reserve(1000, TensorHeader("r", 1000, 0, "e0", 1, [3000], "uint8", 3000)) is not None
    assert list(receiver.rooms) == [1000]
    assert pushes._open == {1000}
    assert len(receiver.received) == num_left
    for tensor in receiver.received:
        assert tensor.data == bytes([tensor.header.input_id]) * 3000
        assert tensor.header.checksum == checksum(tensor.data)
        assert asyncio.run(tensor.verify()) is None
    pushes.close()


def test_a_header_without_its_checksum_is_what_is_given() -> None:
    """So that both sides speak of one tensor: what is announced differs in the checksum alone."""
    receiver = Receiver()
    pushes = PushBuffers(receiver.hear)
    head = TensorHeader("r", 3, 1, "e0", 7, [750], "float32", 3000)
    given = pushes.reserve(0, head)
    assert given is not None
    given.touch()
    given.send(memoryview(bytes(range(250)) * 12))
    (tensor,) = receiver.received
    assert msgspec.structs.replace(tensor.header, checksum=head.checksum) == head
    pushes.close()
