"""Early sends: the computing thread writes a tensor into memory that the receiver mapped after the grant.

    loop                        the thread that computes
    reserve --> touched, ready
                                send: Written, pieces ..., Announce
    discard, at the latest when the handoff ends

Between computation and announcement no loop wakes up, and no byte is copied twice. Each buffer serves a single tensor:
a stopped sender may write on without harm. See received, and docs/reference/transports.md for the gain.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec
import numpy as np

from broker.transports.checksums import PIECE_BYTES
from broker.transports.linked.wire import Announce
from broker.transports.received import Bytes
from broker.transports.shm import segment
from broker.transports.shm.wire import SCHEME, PushOffer, PushWithdraw, ToReceiver, Written
from common.hashing import Checksum
from common.messages import TensorHeader

State: TypeAlias = Literal["untouched", "ready", "sending", "sent", "discarded"]
MIN_BYTES: Final = 2**18
"""A smaller tensor is copied in less time; and a process may have 65,530 mappings."""
MAX_BYTES: Final = 32 * 2**20
"""A larger tensor would hold up the computing thread for too long."""
REPORT_BYTES: Final = 2 * PIECE_BYTES
"""The sender reports after so many bytes, and the receiver hashes them during the next copy."""
MAX_PUSHES: Final = 16
"""Buffers without an announcement yet, per pair of processes."""


def is_worth_it(num_bytes: int) -> bool:
    """Return whether tensors of this size are sent early."""
    return MIN_BYTES <= num_bytes <= MAX_BYTES


class PushBuffer:
    """Memory for one tensor, shared with the receiver: the way out of the computing thread, ahead of the loop."""

    scheme: ClassVar[str] = SCHEME

    def __init__(self, slot: int, header: TensorHeader, memory: Bytes, pushes: PushBuffers) -> None:
        self.sent_s: float | None = None
        """Unix time of the start of the early send; None if the tensor still has to be sent."""
        self._slot = slot
        self._header = header
        self._memory = memory
        self._pushes = pushes
        self._changing = threading.Lock()
        self._state: State = "untouched"

    def touch(self) -> None:
        """Let the system find pages, once and in a thread of its own; nothing is sent before."""
        if self._state != "untouched":
            return
        self._memory[:: mmap.PAGESIZE] = 0  # by NumPy, which lets other threads run meanwhile
        with self._changing:
            if self._state == "untouched":
                self._state = "ready"

    def send(self, data: memoryview) -> None:
        """Copy the bytes and announce the tensor, at once or not at all. Blocks for as long as the copy takes."""
        if data.nbytes != self._header.size_bytes:
            return
        with self._changing:
            if self._state != "ready":
                return
            self._state = "sending"
            target = self._memory.data  # the buffer may be discarded from now on
        began_s = time.time()
        header = self._write(data, target)
        with self._changing:
            if self._state == "sending" and self._pushes.try_send(Announce(self._slot, 0, data.nbytes, header), ()):
                self._state, self.sent_s = "sent", began_s
                self._pushes.forget(self._slot)
                return
            self._state = "discarded"
        self._pushes.withdraw(self._slot)

    def discard(self) -> None:
        """Free the memory after any outcome: for the loop. Idempotent."""
        with self._changing:
            before = self._state
            if before != "sent":
                self._state = "discarded"
            self._memory = np.zeros(0, np.uint8)
        if before in ("untouched", "ready"):
            self._pushes.withdraw(self._slot)

    def _write(self, data: memoryview, target: memoryview) -> TensorHeader:
        """Copy the bytes; return the header with their checksum."""
        slot, digest = self._slot, Checksum()
        self._pushes.try_send(Written(slot, 0), ())  # wakes the receiver during the first copy
        for start in range(0, data.nbytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, data.nbytes)
            target[start:end] = data[start:end]
            digest.update(data[start:end])
            if end % REPORT_BYTES == 0 and end + PIECE_BYTES <= data.nbytes:
                self._pushes.try_send(Written(slot, end), ())
        return msgspec.structs.replace(self._header, checksum=digest.intdigest())


class PushBuffers:
    """The early sends over one connection, with `try_send`. Methods are for any thread, but `reserve` and `close`."""

    def __init__(self, try_send: Callable[[ToReceiver, Sequence[int]], bool]) -> None:
        self.try_send = try_send
        self._open: set[int] = set()
        self._withdrawn: deque[int] = deque()  # not reported to the receiver yet
        self._reporting = threading.Lock()
        self._touching = ThreadPoolExecutor(1, "pushes")  # not asyncio's, which others may keep waiting

    def reserve(self, slot: int, header: TensorHeader) -> PushBuffer | None:
        """Share memory for a tensor; None if the receiver has enough or the system has no more."""
        if not self._report() or len(self._open) >= MAX_PUSHES:
            return None
        try:
            fd, memory = segment.create(header.size_bytes)
        except OSError:
            return None
        try:
            if not self.try_send(PushOffer(slot, header), [fd]):
                return None
        finally:
            os.close(fd)
        self._open.add(slot)
        buffer = PushBuffer(slot, header, memory, self)
        try:
            self._touching.submit(buffer.touch)
        except RuntimeError:  # no more threads
            buffer.discard()
            return None
        return buffer

    def forget(self, slot: int) -> None:
        """Note that the memory of `slot` is now the receiver's."""
        self._open.discard(slot)

    def withdraw(self, slot: int) -> None:
        """Report to the receiver that no tensor will arrive in `slot`: now, or before the next early send."""
        self._withdrawn.append(slot)
        self._report()

    def close(self) -> None:
        """Free everything; open early sends are not announced any more."""
        self._touching.shutdown(wait=False, cancel_futures=True)

    def _report(self) -> bool:
        """Return False while the receiver does not know of every withdrawn slot."""
        with self._reporting:
            while self._withdrawn:
                slot = self._withdrawn[0]
                if not self.try_send(PushWithdraw(slot), ()):
                    return False
                self._withdrawn.popleft()
                self._open.discard(slot)
            return True
