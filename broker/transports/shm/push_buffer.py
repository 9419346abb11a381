"""Early sends: the computing thread writes a tensor into memory that the receiver mapped after the grant.

    loop                        the thread that makes it
    give --> touched, ready
                                send: Written, pieces ..., Announce
    drop, at the latest when the handoff ends

Nothing is awaited between the end of the computation and the announcement: no loop wakes up, no byte is copied twice.
Each buffer serves a single tensor: a sender that was stopped during the write may go on at any time without harm. See
push_target for the other side.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from broker.transports.checksums import PIECE_BYTES
from broker.transports.shm import segment
from broker.transports.shm.segment import Bytes
from broker.transports.shm.wire import Announce, Give, TakeBack, ToReceiver, Written
from common.hashing import Checksum
from common.messages import TensorHeader

State: TypeAlias = Literal["untouched", "touching", "ready", "leaving", "left", "dropped"]
MIN_BYTES: Final = 2**18
"""A smaller tensor is copied in less time than all of this takes; and a process may have 65,530 mappings."""
MAX_BYTES: Final = 32 * 2**20
"""A larger tensor would hold up the computing thread for too long."""
TELL_BYTES: Final = 2 * PIECE_BYTES
"""The receiver is told after so many bytes each, and reads them while the next ones are copied. Each time may wake it,
which costs the sender as much as a quarter of them."""
MAX_GIFTS: Final = 16
"""Given and not announced yet, per pair of processes."""


def is_worth_it(num_bytes: int) -> bool:
    """Whether tensors of this size leave this way."""
    return MIN_BYTES <= num_bytes <= MAX_BYTES


class EarlySend(Protocol):
    """The path of one tensor out of the computing thread, ahead of the loop."""

    scheme: str
    left_s: float | None
    """Unix time of the start of the early send; None if the tensor still has to be sent."""

    def send(self, data: memoryview) -> None:
        """Copy the bytes and tell the receiver, at once or not at all. Blocks for as long as the copy takes."""

    def drop(self) -> None:
        """Free the memory after any outcome: for the loop. Idempotent."""


class PushBuffer:
    """Memory for one tensor, shared with the receiver. See `EarlySend`; `touch` is for a thread of its own."""

    def __init__(self, scheme: str, slot: int, header: TensorHeader, memory: Bytes, gifts: PushBuffers) -> None:
        self.scheme = scheme
        self.left_s: float | None = None
        self._slot = slot
        self._header = header
        self._memory = memory
        self._gifts = gifts
        self._changing = threading.Lock()
        self._state: State = "untouched"

    def touch(self) -> None:
        """Let the system find pages; nothing is sent before."""
        memory = self._memory
        if self._change("untouched", "touching"):
            memory[:: mmap.PAGESIZE] = 0  # by NumPy, which lets other threads run meanwhile
            self._change("touching", "ready")

    def send(self, data: memoryview) -> None:
        if data.nbytes != self._header.size_bytes:
            return
        with self._changing:
            if self._state != "ready":
                return
            self._state = "leaving"
            target = self._memory.data  # it may be dropped from now on
        began_s = time.time()
        header = self._write(data, target)
        with self._changing:
            if self._state == "leaving" and self._gifts.say(Announce(self._slot, 0, data.nbytes, header)):
                self._state, self.left_s = "left", began_s
                self._gifts.announced(self._slot)
                return
            self._state = "dropped"
        self._gifts.take_back(self._slot)

    def drop(self) -> None:
        with self._changing:
            before = self._state
            if before != "left":
                self._state = "dropped"
            self._memory = np.zeros(0, np.uint8)
        if before in ("untouched", "touching", "ready"):
            self._gifts.take_back(self._slot)

    def _write(self, data: memoryview, target: memoryview) -> TensorHeader:
        """Copy the bytes; return the header with their checksum."""
        slot, digest = self._slot, Checksum()
        self._gifts.say(Written(slot, 0))  # wakes the receiver while there is something to do here
        for start in range(0, data.nbytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, data.nbytes)
            target[start:end] = data[start:end]
            digest.update(data[start:end])
            if end % TELL_BYTES == 0 and end + PIECE_BYTES <= data.nbytes:
                self._gifts.say(Written(slot, end))
        return msgspec.structs.replace(self._header, checksum=digest.value)

    def _change(self, before: State, after: State) -> bool:
        with self._changing:
            if self._state != before:
                return False
            self._state = after
            return True


class PushBuffers:
    """The early sends over one connection. Every method but `give` and `close` is for any thread."""

    def __init__(self, scheme: str, say: Callable[[ToReceiver, Sequence[int]], bool]) -> None:
        """Send by `say`: messages with descriptors, at once or False, from any thread."""
        self._scheme = scheme
        self._say = say
        self._given: set[int] = set()
        self._untold: deque[int] = deque()
        self._telling = threading.Lock()
        self._touching = ThreadPoolExecutor(1, "gifts")  # not asyncio's, which others may keep waiting

    def give(self, slot: int, header: TensorHeader) -> PushBuffer | None:
        """Share memory for a tensor; None if the receiver has enough or the system has no more."""
        if not self._tell() or len(self._given) >= MAX_GIFTS:
            return None
        try:
            fd, memory = segment.create(header.size_bytes)
        except OSError:
            return None
        try:
            if not self._say(Give(slot, header), [fd]):
                return None
        finally:
            os.close(fd)
        self._given.add(slot)
        gift = PushBuffer(self._scheme, slot, header, memory, self)
        try:
            self._touching.submit(gift.touch)
        except RuntimeError:  # no more threads
            gift.drop()
            return None
        return gift

    def say(self, message: Written | Announce) -> bool:
        """Send a message at once; False if impossible."""
        return self._say(message, ())

    def announced(self, slot: int) -> None:
        """Note that the memory of `slot` is now the receiver's."""
        self._given.discard(slot)

    def take_back(self, slot: int) -> None:
        """Tell the receiver that no tensor will arrive in `slot`: now, or before the next early send."""
        self._untold.append(slot)
        self._tell()

    def close(self) -> None:
        """Free everything; open early sends are not announced any more."""
        self._touching.shutdown(wait=False, cancel_futures=True)

    def _tell(self) -> bool:
        """Return False while the receiver has not heard of every withdrawn slot."""
        with self._telling:
            while self._untold:
                slot = self._untold[0]
                if not self._say(TakeBack(slot), ()):
                    return False
                self._untold.popleft()
                self._given.discard(slot)
            return True
