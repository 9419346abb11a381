"""The receiver's half of the handoff: offers in, grants out, tensors into the encoder cache.

    MISSING --offer--> OFFERED --room--> GRANTED --tensor--> READY --prefilled--> CONSUMED
       ^                  |                 |                  |
       +------------------+--- deadline ----+--- taken back ---+     (the owner of the media is asked again)

Memory is granted in the order of requests, and within a request in the order of inputs. Three promises hold:
- No tensor is sent without a grant: the budget holds in any burst.
- Every grant ends: delivered, cancelled with its request, or expired with its lease.
- A burst drains: if no request can run and the oldest offer finds no memory, the youngest holders release theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from common.errors import ErrorInfo
from common.messages import Grant, InputNeeded, Offer, Receipt
from engine.cache.encoder_cache import EncoderCacheManager
from engine.handoff.early_offers import KEEP_S, EarlyOffers
from engine.handoff.offer_check import OfferCheck
from engine.scheduler.capacity import CacheLookup
from engine.state.engine_state import EngineState
from engine.state.request import InputState, Request, RequestInput


@dataclass(eq=False)
class InputReceiver:
    """Inputs of all requests of one engine. A grant lasts `lease_s`; `offer_check` refuses misfit offers.

    What `cache_lookup` finds in the KV cache gets no room: it is answered as cached when its request begins.
    """

    state: EngineState
    cache: EncoderCacheManager
    offer_check: OfferCheck
    cache_lookup: CacheLookup
    lease_s: float
    pending: list[tuple[Request, RequestInput]] = field(default_factory=list)
    """OFFERED, in the order of grants."""
    granted: dict[tuple[str, int], RequestInput] = field(default_factory=dict)
    """Inputs whose tensors are on their way, by request and input id."""
    _requests: dict[str, Request] = field(default_factory=dict)
    _dormant: list[tuple[Request, RequestInput]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters = {"leases_expired": 0, "inputs_revoked": 0, "inputs_stored": 0}
        self.counters |= {"inputs_rejected": 0, "offers_expired": 0}
        self.early: EarlyOffers[Offer] = EarlyOffers(min(self.lease_s, KEEP_S))

    # --- requests come and go

    def add_request(self, request: Request) -> None:
        """Accept a request, and offers that came before."""
        self._requests[request.request_id] = request
        for item in request.inputs:
            early = self.early.pop(request.request_id, item.slot.input_id, request.attempt)
            if early is not None:
                self.offer(early)

    def end_request(self, request: Request) -> None:
        """Release everything held for the request; later offers and tensors are cancelled."""
        self.state.emit(*self.early.forget(request.request_id, request.attempt))
        if self._requests.pop(request.request_id, None) is None:
            return
        self.pending = [pair for pair in self.pending if pair[0] is not request]
        self._dormant = [pair for pair in self._dormant if pair[0] is not request]
        for item in request.inputs:
            self._release(request, item)

    # --- offers

    def offer(self, offer: Offer) -> None:
        """Handle an offer. A repeated offer is answered again: the sender may have missed the answer."""
        request_id, input_id, attempt = offer.request_id, offer.input_id, offer.attempt
        request = self._requests.get(request_id)
        if request is None or request.attempt < offer.request_attempt:
            self.state.emit(*self.early.keep(offer))
            return
        if request.attempt > offer.request_attempt:
            self.state.emit(Grant(request_id, input_id, attempt, "cancelled"))
            return
        item = next((item for item in request.inputs if item.slot.input_id == input_id), None)
        if item is None:
            unknown = ErrorInfo("internal_error", f"the request has no input {input_id}")
            self.state.emit(Grant(request_id, input_id, attempt, "refused", unknown))
            return
        error = self._fault(item, offer) or self._too_much(request, item, offer)
        if error is not None:
            self.state.emit(Grant(request_id, input_id, attempt, "refused", error))
        elif attempt < item.attempt or (attempt == item.attempt and item.state is InputState.MISSING):
            self.state.emit(Grant(request_id, input_id, attempt, "cancelled"))
        elif item.usable or item.state is InputState.DORMANT:
            item.attempt = attempt  # should it be lost again, then so is what this attempt was told
            self.state.emit(Grant(request_id, input_id, attempt, "cached"))
        elif attempt > item.attempt:
            self._accept(request, item, offer)
        elif item.state is InputState.GRANTED:
            self.state.emit(Grant(request_id, input_id, attempt, "granted"))

    def _fault(self, item: RequestInput, offer: Offer) -> ErrorInfo | None:
        if offer.size_bytes > self.cache.capacity_bytes:
            return ErrorInfo(
                "item_too_large",
                f"input {item.slot.input_id} needs {offer.size_bytes} bytes of encoder cache, the whole budget is "
                f"{self.cache.capacity_bytes}: send a smaller one, or serve with a larger --encoder-cache-bytes",
            )
        if offer.content_hash != item.slot.content_hash:
            return ErrorInfo("internal_error", f"input {item.slot.input_id} is offered with another content hash")
        fault = self.offer_check.fault(offer)
        if fault is not None:
            return ErrorInfo("invalid_request", f"input {item.slot.input_id}: {fault}")
        known = item.offer
        if known is not None and known.layout != offer.layout:
            return ErrorInfo("internal_error", f"input {item.slot.input_id} is offered again with another layout")
        return None

    def _too_much(self, request: Request, item: RequestInput, offer: Offer) -> ErrorInfo | None:
        """Refuse inputs that exceed the cache together: cross-attention needs all inputs of a request at once."""
        if not request.cross_attention:
            return None
        known = [other.offer for other in request.inputs if other is not item and other.offer is not None]
        sizes = {one.content_hash: one.size_bytes for one in (*known, offer)}
        if sum(sizes.values()) <= self.cache.capacity_bytes:
            return None
        return ErrorInfo(
            "item_too_large",
            f"{len(sizes)} inputs of the request need {sum(sizes.values())} bytes of encoder cache at once, the whole "
            f"budget is {self.cache.capacity_bytes}: send fewer, or serve with a larger --encoder-cache-bytes",
        )

    def _accept(self, request: Request, item: RequestInput, offer: Offer) -> None:
        self._release(request, item)
        self.pending = [pair for pair in self.pending if pair[1] is not item]
        item.attempt, item.offer, item.deadline_s = offer.attempt, offer, offer.deadline_s
        item.state = InputState.OFFERED
        self.pending.append((request, item))
        request.expand_prompt()

    def ask(self, request: Request) -> None:
        """Ask for every missing input of a request."""
        for item in request.inputs:
            if item.state is InputState.MISSING:
                self._ask_for(request, item)

    def _ask_for(self, request: Request, item: RequestInput) -> None:
        name, attempt = request.request_id, max(0, item.attempt)
        self.state.emit(InputNeeded(name, item.slot.input_id, attempt, request.attempt))

    def withdraw(self, request_id: str, input_id: int, attempt: int) -> None:
        """Release the memory of exactly this attempt, silently: the owner of the media learns from the sender."""
        self.early.withdraw(request_id, input_id, attempt)
        request = self._requests.get(request_id)
        item = next((i for i in request.inputs if i.slot.input_id == input_id), None) if request else None
        offered = item is not None and item.state in (InputState.OFFERED, InputState.GRANTED)
        if request is None or item is None or not offered or item.attempt != attempt:
            return
        self.pending = [pair for pair in self.pending if pair[1] is not item]
        self._release(request, item, silently=True)
        item.state = InputState.MISSING

    # --- grants

    def grant(self) -> None:
        """Reserve memory for offers in order, as far as possible. Content in the cache needs no reservation."""
        self._wake_dormant()
        self.pending.sort(key=_grant_order)  # a grant of KV moves a request ahead of others
        waiting: list[tuple[Request, RequestInput]] = []
        full = False
        for request, item in self.pending:
            assert item.offer is not None
            name, reference = item.offer.content_hash, (request.request_id, item.slot.input_id)
            if self.cache.is_ready(name):
                self.cache.acquire(name, reference)
                item.state = InputState.READY
                self.state.emit(Grant(*reference, item.attempt, "cached"))
            elif self.cache_lookup.covers(request, item):
                waiting.append((request, item))
            elif full or self.cache.is_reserved(name) or not self.cache.can_reserve(item.offer.size_bytes):
                # Same content on its way for somebody else: wait for it. No room: nobody younger may overtake.
                full = full or not self.cache.is_reserved(name)
                waiting.append((request, item))
            else:
                self.cache.reserve(name, item.offer.size_bytes, reference)
                item.state, item.deadline_s = InputState.GRANTED, time.monotonic() + self.lease_s
                self.granted[reference] = item
                self.state.emit(Grant(*reference, item.attempt, "granted"))
        self.pending = waiting

    def _wake_dormant(self) -> None:
        """Ask again for inputs whose KV has left the cache."""
        dormant, self._dormant = self._dormant, []
        for request, item in dormant:
            if item.state is not InputState.DORMANT:
                continue
            if self.cache_lookup.covers(request, item):
                self._dormant.append((request, item))
            else:
                self._lose(request, item)

    def update(self, requests: Iterable[Request]) -> None:
        """Act on inputs that the scheduler has marked. Offers of CONSUMED inputs are answered as cached. DORMANT inputs
        are reacquired from the cache or, unless their KV is there, from the encoder."""
        for request in dict.fromkeys(requests):
            for pair in [pair for pair in self.pending if pair[0] is request]:
                if pair[1].state is InputState.CONSUMED:
                    self.pending.remove(pair)
                    self.state.emit(Grant(request.request_id, pair[1].slot.input_id, pair[1].attempt, "cached"))
            self._dormant = [pair for pair in self._dormant if pair[0] is not request]
            for item in request.inputs:
                if item.state is not InputState.DORMANT:
                    continue
                assert item.offer is not None
                if self.cache.is_ready(item.offer.content_hash):
                    self.cache.acquire(item.offer.content_hash, (request.request_id, item.slot.input_id))
                    item.state = InputState.READY
                elif self.cache_lookup.covers(request, item):
                    self._dormant.append((request, item))
                else:
                    self._lose(request, item)

    @property
    def is_stuck(self) -> bool:
        """Return True if offers wait for memory and no granted tensor will free any."""
        return self._first_without_room() is not None and not self.granted

    def _first_without_room(self) -> tuple[Request, RequestInput] | None:
        return next((pair for pair in self.pending if not self.cache_lookup.covers(*pair)), None)

    def revoke(self, *, only_blocked: bool) -> bool:
        """Free memory for the oldest offer at the cost of the youngest holders, if no granted tensor is on the way.

        `only_blocked` spares inputs that the prefill will reach by itself, and takes those that stand behind a
        missing one of their request. Returns False where there was nothing to take back.
        """
        first = None if self.granted else self._first_without_room()
        if first is None:
            return False
        _, item = first
        assert item.offer is not None
        if self._rest_covered():
            return True
        holders, gain = self._revocable(first, only_blocked=only_blocked)
        if not self.cache.can_reserve(item.offer.size_bytes - gain):
            return False  # what is lost in vain would be back at once, out of the cache, and lost again
        revoked = 0
        for holder, held in holders:
            if self.cache.can_reserve(item.offer.size_bytes):
                break
            self._lose(holder, held)
            revoked += 1
        self.counters["inputs_revoked"] += revoked
        return revoked > 0

    def _revocable(
        self, first: tuple[Request, RequestInput], *, only_blocked: bool
    ) -> tuple[list[tuple[Request, RequestInput]], int]:
        """Return the inputs that may release memory for `first`, youngest first, and their bytes.

        Where an input that keeps its room has the same content, nothing would be gained.
        """

        def may_release(pair: tuple[Request, RequestInput]) -> bool:
            if _grant_order(pair) <= _grant_order(first):
                return False
            reachable = pair[0].num_computable_tokens(pair[0].sequences[0])  # else another input has to come before
            return not only_blocked or pair[1].start is None or pair[1].start >= reachable

        ready = sorted(self._ready_inputs(), key=_grant_order, reverse=True)
        kept = {pair[1].slot.content_hash for pair in ready if not may_release(pair)}
        holders = [pair for pair in ready if pair[1].slot.content_hash not in kept]
        sizes = {held.slot.content_hash: held.offer.size_bytes for _, held in holders if held.offer is not None}
        return holders, sum(sizes.values())

    def _rest_covered(self) -> bool:
        """Release inputs that the KV cache has too. Otherwise a request could wait for memory that the same request
        holds. Return False where there were none."""
        covered = [pair for pair in self._ready_inputs() if self.cache_lookup.covers(*pair)]
        for request, item in covered:
            self._release(request, item)
            item.state = InputState.DORMANT
        self._dormant += covered
        return bool(covered)

    def _ready_inputs(self) -> list[tuple[Request, RequestInput]]:
        requests = self._requests.values()
        return [(holder, item) for holder in requests for item in holder.inputs if item.state is InputState.READY]

    # --- tensors

    def deliver(self, request_id: str, input_id: int, attempt: int, tensor: torch.Tensor) -> None:
        """Store a granted tensor in the cache; reject any other tensor."""
        request = self._requests.get(request_id)
        item = next((i for i in request.inputs if i.slot.input_id == input_id), None) if request else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        if item is None:
            self._reject(request_id, input_id, attempt, "cancelled")
        elif item.usable and item.attempt == attempt:
            self.state.emit(Receipt(request_id, input_id, attempt, "stored"))  # sent twice: the first one counts
        elif item.state is not InputState.GRANTED or item.attempt != attempt:
            self._reject(request_id, input_id, attempt, "expired")
        elif item.offer is None or (list(tensor.shape), dtype) != (list(item.offer.shape), item.offer.dtype):
            self._reject(request_id, input_id, attempt, "corrupt")
        else:
            del self.granted[request_id, input_id]
            self.cache.commit(item.offer.content_hash, tensor)
            item.state = InputState.READY
            self.counters["inputs_stored"] += 1
            self.state.emit(Receipt(request_id, input_id, attempt, "stored"))

    def _reject(self, request_id: str, input_id: int, attempt: int, reason: str) -> None:
        self.counters["inputs_rejected"] += 1
        self.state.emit(Receipt(request_id, input_id, attempt, reason))  # type: ignore[arg-type]

    def consume(self, request: Request) -> None:
        """Release inputs that the prefill has passed: their values are in the KV cache."""
        num_passed = self.cache_lookup.num_passed_tokens(request)
        for item in request.inputs:
            if item.state is not InputState.READY:
                continue
            end = 1 if request.cross_attention else item.end
            if end is not None and end <= num_passed:
                self._release(request, item)
                item.state = InputState.CONSUMED

    # --- deadlines

    def deadlines_s(self) -> list[float]:
        items = (*self.granted.values(), *(item for _, item in self.pending))
        return [item.deadline_s for item in items] + self.early.deadlines_s()

    def expire(self, now_s: float) -> None:
        """End leases and offers past their deadline; ask the owner of the media again."""
        for request_id, input_id in [key for key, item in self.granted.items() if item.deadline_s <= now_s]:
            self.counters["leases_expired"] += 1
            self._lose(self._requests[request_id], self.granted[request_id, input_id])
        for request, item in [pair for pair in self.pending if pair[1].deadline_s <= now_s]:
            self.counters["offers_expired"] += 1
            self.pending.remove((request, item))
            self._lose(request, item)
        self.state.emit(*self.early.expire(now_s))

    def _lose(self, request: Request, item: RequestInput) -> None:
        self._release(request, item)
        item.state = InputState.MISSING
        self._ask_for(request, item)

    def _release(self, request: Request, item: RequestInput, *, silently: bool = False) -> None:
        """Release the cache memory of an input. An unfinished handoff is cancelled at the sender, unless `silently`."""
        reference = (request.request_id, item.slot.input_id)
        if item.state in (InputState.OFFERED, InputState.GRANTED) and not silently:
            self.state.emit(Grant(*reference, item.attempt, "cancelled"))
        if item.state in (InputState.GRANTED, InputState.READY) and item.offer is not None:
            self.cache.release(item.offer.content_hash, reference)
        self.granted.pop(reference, None)

    def is_empty(self) -> bool:
        return not (self._requests or self.pending or self.granted or self.early or self.cache.num_references)


def _grant_order(pair: tuple[Request, RequestInput]) -> tuple[tuple[int, int], int]:
    return pair[0].order, pair[1].slot.input_id
