"""Slots for a limited number of tasks, shared out fairly among requests.

A request may have another slot while it has fewer than a quarter as many as are free: some stay free for newcomers, as
in the memory that the ports of a switch share (Choudhury and Hahne, 1998). A slot that comes free goes to the waiting
request with the fewest slots; among equals, to the longest waiting request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from proxy.server.errors import Overloaded


class SlotTimeout(Overloaded):
    """Other requests held all slots for longer than the patience."""


class FairSemaphore:
    """All slots. Use within one event loop."""

    def __init__(self, num_slots: int, patience_s: float) -> None:
        """A request without a slot waits for `patience_s`."""
        self.num_slots = num_slots
        self.num_free = num_slots
        self.patience_s = patience_s
        self.waiting: list[Share] = []

    def hand_out(self, num_freed: int = 0) -> None:
        """Give free slots to waiting requests, after `num_freed` more slots have come free."""
        self.num_free += num_freed
        while self.waiting:
            share = min(self.waiting, key=lambda share: share.num_held)
            if share.num_held >= -(-self.num_free // 4):
                return  # and no other request has fewer
            self.waiting.remove(share)
            self.num_free -= 1
            share.num_held += 1
            share.turns.popleft().set_result(None)
            if share.turns:
                self.waiting.append(share)


@dataclass(eq=False)
class Share:
    """Slots of a request, and the turns of waiting tasks."""

    slots: FairSemaphore
    num_held: int = 0
    turns: deque[asyncio.Future[None]] = field(default_factory=deque)
    _emptied_s: float = 0.0
    """Loop time at which `num_held` last became zero."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot, after waiting for one.

        Raises SlotTimeout where the wait is too long and the request holds no other slot.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    def keep_for(self, work: asyncio.Future[Any]) -> None:
        """Hold an additional slot until `work` ends: the caller is cancelled and cannot stop the work."""
        self.num_held += 1
        self.slots.num_free -= 1
        work.add_done_callback(lambda _: self._release())

    async def _acquire(self) -> None:
        loop, patience_s = asyncio.get_running_loop(), self.slots.patience_s
        turn, began_s = loop.create_future(), loop.time()
        self.turns.append(turn)
        if self not in self.slots.waiting:
            self.slots.waiting.append(self)
        self.slots.hand_out()
        try:
            while not turn.done():
                without_s = 0.0 if self.num_held else loop.time() - max(began_s, self._emptied_s)
                if without_s >= patience_s:
                    limit = f"at most {self.slots.num_slots} media are fetched at once"
                    message = f"{limit}, and none of these places has come free within {patience_s:g} s"
                    raise SlotTimeout(f"{message}; try again shortly")
                await asyncio.wait([turn], timeout=patience_s - without_s)
        except BaseException:
            self._withdraw(turn)
            raise

    def _withdraw(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # the slot and the cancellation came in the same turn of the loop
            self._release()
            return
        self.turns.remove(turn)
        if not self.turns:
            self.slots.waiting.remove(self)

    def _release(self) -> None:
        self.num_held -= 1
        if self.num_held == 0:
            self._emptied_s = asyncio.get_running_loop().time()
        self.slots.hand_out(1)
