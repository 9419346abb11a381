"""Offers that came before their request, and ids of ended requests: both are normal."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Final, Generic, TypeVar

from common.messages import REPEAT_S, Grant, KvOffer, Offer

MAX_ENDED: Final = 8192
"""Ended requests remembered, so that a late offer is answered as cancelled."""
MAX_EARLY_OFFERS: Final = 8192
"""Offers kept for requests that have not arrived."""
KEEP_S: Final = 2 * REPEAT_S
"""How long to keep one that is not repeated: its sender has given it up, or one repetition was lost, or late by as long
as it takes to the next. With less, a slow machine would lose offers of senders that live, and ask for them again."""

M = TypeVar("M", Offer, KvOffer)


class EarlyOffers(Generic[M]):
    """Keep the newest offer of each input until the request comes in the offer's attempt, the sender withdraws, the
    deadline passes, or no repetition came for `lease_s`: a living sender repeats an offer.

    What is given up on the way is returned as answers to the senders, and counted.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._offers: OrderedDict[tuple[str, int], tuple[M, float]] = OrderedDict()  # with the end of keeping
        self._ended: OrderedDict[str, float] = OrderedDict()  # request -> the last attempt of it that has ended
        self.num_expired = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._offers)

    def keep(self, offer: M) -> list[Grant]:
        """Keep an offer for a request, or an attempt of a request, that has not come yet."""
        key = offer.request_id, offer.input_id
        known = self._offers[key][0].attempt if key in self._offers else offer.attempt
        if offer.request_attempt <= self._ended.get(offer.request_id, -1) or offer.attempt < known:
            return [Grant(*key, offer.attempt, "cancelled")]
        cancelled = [self._cancel(key)] if offer.attempt > known else []
        self._offers[key] = offer, min(offer.deadline_s, time.monotonic() + self._lease_s)
        while len(self._offers) > MAX_EARLY_OFFERS:
            self.num_evicted += 1
            cancelled.append(self._cancel(next(iter(self._offers))))
        return cancelled

    def pop(self, request_id: str, input_id: int, request_attempt: int = 0) -> M | None:
        """Remove and return the offer for an input of a request that has come; None without one."""
        offer, _ = self._offers.get((request_id, input_id), (None, 0.0))
        if offer is None or offer.request_attempt != request_attempt:
            return None
        del self._offers[request_id, input_id]
        return offer

    def withdraw(self, request_id: str, input_id: int, attempt: int) -> None:
        """Discard an offer that the sender has given up. Unknown offers and other attempts are fine."""
        offer, _ = self._offers.get((request_id, input_id), (None, 0.0))
        if offer is not None and offer.attempt == attempt:
            del self._offers[request_id, input_id]

    def forget(self, request_id: str, request_attempt: int | None) -> list[Grant]:
        """Record the end of a request in this attempt and all before; None: as far as known, else in every attempt."""
        last = self._ended.get(request_id, math.inf) if request_attempt is None else request_attempt
        self._ended[request_id] = max(last, self._ended.get(request_id, -1))
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        own = [(key, offer) for key, (offer, _) in self._offers.items() if key[0] == request_id]
        return [self._cancel(key) for key, offer in own if offer.request_attempt <= last]

    def deadlines_s(self) -> list[float]:
        """Return the times at which `expire` has something to cancel."""
        return [kept_until_s for _, kept_until_s in self._offers.values()]

    def expire(self, now_s: float) -> list[Grant]:
        """Cancel offers whose request did not come in time."""
        expired = [key for key, (_, kept_until_s) in self._offers.items() if kept_until_s <= now_s]
        self.num_expired += len(expired)
        return [self._cancel(key) for key in expired]

    def _cancel(self, key: tuple[str, int]) -> Grant:
        return Grant(*key, self._offers.pop(key)[0].attempt, "cancelled")
