"""Assembly of tensors from the pieces sent over ZMQ, by sender. Only KV is joined, which hardly ever has pieces.

Unfinished tensors are bounded, for any sender: one tensor per sender, TOTAL times the largest of all senders together,
and `stale_s` without a new piece. A broken tensor counts once: its later pieces are skipped.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from broker.transports.payload import ChunkedBytes
from broker.transports.received import ReceivedTensor
from broker.transports.zmq.wire import PIECE_BYTES, First, Head, Next
from common.messages import TensorHeader
from common.telemetry import get_logger

TOTAL: Final = 2
"""How many times the largest tensor all pieces together may take; where it is more, the stalest tensor is discarded."""
MAX_BROKEN: Final = 1000
"""Senders remembered for a broken last tensor. Beyond them the next piece of a tensor may count once more."""

log = get_logger()


@dataclass
class _Partial:
    header: TensorHeader
    size_bytes: int
    pieces: ChunkedBytes = field(default_factory=ChunkedBytes)
    touched_s: float = 0.0


class Assembly:
    """All unfinished tensors of one receiver. Made, used and closed on a running loop."""

    def __init__(self, max_bytes: int, stale_s: float, is_idle: Callable[[], bool]) -> None:
        """Accept tensors of at most `max_bytes`. Discard one after `stale_s` without progress, while `is_idle`."""
        self._max_bytes = max_bytes
        self._stale_s = stale_s
        self._is_idle = is_idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._partials: OrderedDict[bytes, _Partial] = OrderedDict()  # the stalest first
        self._broken: dict[bytes, None] = {}  # senders of whose last tensor no more is taken, the oldest first
        self.num_unfinished = 0
        """Tensors without an end, broken tensors excluded."""

    @property
    def num_bytes(self) -> int:
        """Of all pieces that are kept."""
        return sum(partial.pieces.nbytes for partial in self._partials.values())

    def add(self, sender: bytes, head: Head, data: memoryview) -> ReceivedTensor | None:
        """Return the tensor completed by this message; None if incomplete.

        The beginning of another tensor discards the sender's unfinished tensor. Raises ValueError for a message that
        does not continue the last one: call `discard`.
        """
        partial = self._partials.pop(sender, None)
        if not isinstance(head, Next):
            self.num_unfinished += partial is not None
            self._broken.pop(sender, None)
        elif sender in self._broken:
            return None
        if isinstance(head, TensorHeader):
            return ReceivedTensor(head, data)
        if isinstance(head, First):
            if not PIECE_BYTES < head.size_bytes <= self._max_bytes:
                raise ValueError(
                    f"{head.size_bytes} bytes in pieces of {PIECE_BYTES}; at most {self._max_bytes} are taken"
                )
            partial = _Partial(head.header, head.size_bytes)
        elif partial is None or head.start != partial.pieces.nbytes:
            raise ValueError(f"a piece from byte {head.start} on, which is not where the last one has ended")
        expected = min(PIECE_BYTES, partial.size_bytes - partial.pieces.nbytes)
        if data.nbytes != expected:
            raise ValueError(f"a piece of {data.nbytes} bytes, not {expected}")
        partial.pieces.add(data)
        if isinstance(head, Next) and partial.pieces.nbytes == partial.size_bytes:
            header = msgspec.structs.replace(partial.header, checksum=head.checksum)
            return ReceivedTensor(header, partial.pieces.joined() if header.table else partial.pieces)
        self._keep(sender, partial)
        return None

    def discard(self, sender: bytes) -> None:
        """Discard a sender's broken tensor, and skip messages until another begins."""
        self._partials.pop(sender, None)
        self._broken[sender] = None
        if len(self._broken) > MAX_BROKEN:
            del self._broken[next(iter(self._broken))]

    def close(self) -> None:
        """Discard all unfinished tensors. Idempotent."""
        self._partials.clear()
        self._broken.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _keep(self, sender: bytes, partial: _Partial) -> None:
        partial.touched_s = self._loop.time()
        self._partials[sender] = partial
        while self.num_bytes > TOTAL * self._max_bytes:
            self._discard_stalest("too many have begun")
        if self._timer is None:
            self._timer = self._loop.call_later(self._stale_s, self._discard_stale)

    def _discard_stale(self) -> None:
        self._timer = None
        stale_s = self._loop.time() - self._stale_s
        while self._is_idle() and self._stalest_s <= stale_s:
            self._discard_stalest("its sender has sent no more of it")
        if self._partials:
            self._timer = self._loop.call_later(max(1.0, self._stalest_s - stale_s), self._discard_stale)

    @property
    def _stalest_s(self) -> float:
        return next((partial.touched_s for partial in self._partials.values()), math.inf)

    def _discard_stalest(self, why: str) -> None:
        sender, partial = next(iter(self._partials.items()))
        self.discard(sender)  # should more of it come after all
        self.num_unfinished += 1
        log.warning("a tensor did not come to its end", sender=partial.header.sender, why=why)
