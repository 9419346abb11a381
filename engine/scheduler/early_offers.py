"""Offers that came before their request, and the names of requests that have ended: both are normal."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from common.messages import REPEAT_S
from engine.events import InputCancelled

MAX_ENDED: Final = 8192
"""Ended requests remembered, so that a late offer is answered as cancelled."""
MAX_EARLY_OFFERS: Final = 8192
"""Offers kept for requests that have not arrived."""
KEEP_S: Final = 2 * REPEAT_S
"""How long to keep one that is not repeated: its sender has given it up, or one repetition was lost, or late by as long
as it takes to the next. With less, a slow machine would lose offers of senders that live, and ask for them again."""

M = TypeVar("M")


@dataclass(frozen=True)
class _Offer(Generic[M]):
    attempt: int
    metadata: M
    deadline_s: float
    kept_until_s: float


class EarlyOffers(Generic[M]):
    """Keeps the newest offer of each input until its request comes, its deadline (Unix time) passes, or it has not been
    repeated for `lease_s`: a sender that lives repeats it.

    What is given up on the way is returned as answers to the senders.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._offers: OrderedDict[tuple[str, int], _Offer[M]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def keep(
        self, request_id: str, input_id: int, attempt: int, metadata: M, deadline_s: float
    ) -> list[InputCancelled]:
        """An offer of a request that is not here."""
        key = request_id, input_id
        known = self._offers.get(key)
        if request_id in self._ended or (known is not None and attempt < known.attempt):
            return [InputCancelled(*key, attempt)]
        cancelled = [self._cancel(key)] if known is not None and attempt > known.attempt else []
        self._offers[key] = _Offer(attempt, metadata, deadline_s, min(deadline_s, time.time() + self._lease_s))
        while len(self._offers) > MAX_EARLY_OFFERS:
            cancelled.append(self._cancel(next(iter(self._offers))))
        return cancelled

    def take(self, request_id: str, input_id: int) -> tuple[int, M, float] | None:
        """The request has come: attempt, metadata and deadline of what was offered for this input, if it was."""
        offer = self._offers.pop((request_id, input_id), None)
        return None if offer is None else (offer.attempt, offer.metadata, offer.deadline_s)

    def forget(self, request_id: str) -> list[InputCancelled]:
        """The request has ended, or never will come."""
        self._ended[request_id] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return [self._cancel(key) for key in list(self._offers) if key[0] == request_id]

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        return min((offer.kept_until_s for offer in self._offers.values()), default=None)

    def expire(self, now_s: float) -> list[InputCancelled]:
        """Give up what nobody has come for."""
        return [self._cancel(key) for key, offer in list(self._offers.items()) if offer.kept_until_s <= now_s]

    def _cancel(self, key: tuple[str, int]) -> InputCancelled:
        return InputCancelled(*key, self._offers.pop(key).attempt)
