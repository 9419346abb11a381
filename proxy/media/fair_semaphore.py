"""Places for so many at once, shared out fairly among the requests that want some.

A request may have another place while it has fewer than a quarter as many as are free: alone it has many, of many each
has few, and some stay free for whoever comes next, as in the memory that the ports of a switch share (Choudhury and
Hahne, 1998). Where none is free, the next one goes to the request that has fewest; of equals, to the one that has
waited for longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.server.errors import Overloaded


class SlotTimeout(Overloaded):
    """Others had all places for longer than it makes sense to wait."""


class FairSemaphore:
    """All of them. Everything here runs in one event loop."""

    def __init__(self, num_places: int, patience_s: float) -> None:
        """A request without a place waits for `patience_s`."""
        self.num_places = num_places
        self.num_free = num_places
        self.patience_s = patience_s
        self._waiting: list[Share] = []

    def share(self) -> Share:
        """That of one request, empty at first."""
        return Share(self)

    def wait(self, share: Share) -> None:
        """It wants a place more than it did."""
        if share not in self._waiting:
            self._waiting.append(share)
        self._hand_out()

    def leave(self, share: Share) -> None:
        """It wants none any more."""
        self._waiting.remove(share)

    def change(self, num_free: int) -> None:
        """So many more are free, or fewer."""
        self.num_free += num_free
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            share = min(self._waiting, key=lambda share: share.num_held)
            if share.num_held >= -(-self.num_free // 4):
                return  # and nobody has fewer
            self._waiting.remove(share)
            self.num_free -= 1
            if share.receive():
                self._waiting.append(share)


class Share:
    """What one request has of the places, and still wants."""

    def __init__(self, places: FairSemaphore) -> None:
        self.num_held = 0
        self._emptied_s = 0.0  # of the loop's clock: when it last had none any more
        self._places = places
        self._turns: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """With a place, once there is one.

        Raises SlotTimeout where that takes too long and the request holds no other place.
        """
        await self._take()
        try:
            yield
        finally:
            self._give_back()

    def keep_for(self, work: asyncio.Future[Any]) -> None:
        """Until `work` ends by itself, it has a place, too: that of who is about to leave it behind."""
        self.num_held += 1
        self._places.change(-1)
        work.add_done_callback(lambda _: self._give_back())

    def receive(self) -> bool:
        """Here is a place; whether more are wanted."""
        self.num_held += 1
        self._turns.popleft().set_result(None)
        return bool(self._turns)

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        turn, began_s = loop.create_future(), loop.time()
        self._turns.append(turn)
        self._places.wait(self)
        try:
            while not turn.done():
                without_s = 0.0 if self.num_held else loop.time() - max(began_s, self._emptied_s)
                if without_s >= self._places.patience_s:
                    raise SlotTimeout(self._places_are_taken())
                await asyncio.wait([turn], timeout=self._places.patience_s - without_s)
        except BaseException:
            self._withdraw(turn)
            raise

    def _withdraw(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # it has come just as nobody wanted it any more
            self._give_back()
            return
        self._turns.remove(turn)
        if not self._turns:
            self._places.leave(self)

    def _give_back(self) -> None:
        self.num_held -= 1
        if self.num_held == 0:
            self._emptied_s = asyncio.get_running_loop().time()
        self._places.change(1)

    def _places_are_taken(self) -> str:
        limit = f"at most {self._places.num_places} media are fetched at once"
        return (
            f"{limit}, and none of these places has come free within {self._places.patience_s:g} s; try again shortly"
        )
