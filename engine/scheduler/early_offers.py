"""Offers that came before their request, and the names of requests that have ended: both are normal."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from engine.events import InputCancelled

MAX_ENDED: Final = 8192
"""Ended requests remembered, so that a late offer is answered as cancelled."""
MAX_EARLY_OFFERS: Final = 8192
"""Offers kept for requests that have not arrived."""

M = TypeVar("M")


class EarlyOffers(Generic[M]):
    """Keeps offers until their request comes or their deadline (Unix time) passes, the newest attempt of each input.

    What is given up on the way is returned as answers to the senders.
    """

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[str, int], tuple[int, M, float]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def keep(
        self, request_id: str, input_id: int, attempt: int, metadata: M, deadline_s: float
    ) -> list[InputCancelled]:
        """An offer of a request that is not here."""
        key = request_id, input_id
        known = self._offers.get(key)
        if request_id in self._ended or (known is not None and attempt < known[0]):
            return [InputCancelled(*key, attempt)]
        cancelled = [InputCancelled(*key, known[0])] if known is not None and attempt > known[0] else []
        self._offers[key] = attempt, metadata, deadline_s
        while len(self._offers) > MAX_EARLY_OFFERS:
            oldest, (old_attempt, _, _) = self._offers.popitem(last=False)
            cancelled.append(InputCancelled(*oldest, old_attempt))
        return cancelled

    def take(self, request_id: str, input_id: int) -> tuple[int, M, float] | None:
        """The request has come: attempt, metadata and deadline of what was offered for this input, if it was."""
        return self._offers.pop((request_id, input_id), None)

    def forget(self, request_id: str) -> list[InputCancelled]:
        """The request has ended, or never will come."""
        self._ended[request_id] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return [InputCancelled(*key, self._offers.pop(key)[0]) for key in list(self._offers) if key[0] == request_id]

    def next_deadline_s(self) -> float | None:
        return min((deadline_s for _, _, deadline_s in self._offers.values()), default=None)

    def expire(self, now_s: float) -> list[InputCancelled]:
        over = [key for key, (_, _, deadline_s) in self._offers.items() if deadline_s <= now_s]
        return [InputCancelled(*key, self._offers.pop(key)[0]) for key in over]
