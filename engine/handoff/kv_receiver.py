"""The receiver's half of the handoff between prefill and decode: keys and values of whole prompts.

    WAITING --offer--> OFFERED --room--> RESERVED --all parts--> STARTED
       ^                  |                 |
       +------------------+--- deadline ----+      (the prompt has to be computed again: a newer attempt)

Blocks are reserved for a whole prompt before any part is sent, in the order of requests, and not taken back before the
lease ends. Three promises hold:
- No part is sent without a grant, and KV in the caches here is not sent at all.
- Every reservation ends: by all parts, an abort, or the end of its lease, which each part renews.
- No request waits for ever: senders let a granted request go before all others. So a reservation here does not wait
  for one elsewhere.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from common.errors import ErrorInfo
from common.messages import KV_INPUT_ID, Grant, InputNeeded, KvOffer, Receipt
from engine.cache.block_pool import IntegrityError
from engine.handoff.early_offers import KEEP_S, EarlyOffers
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.offer_check import KvOfferCheck, KvPart
from engine.handoff.token_ranges import TokenRanges
from engine.runner.decoder import DecoderRunner
from engine.scheduler.decoder import DecoderScheduler
from engine.state.engine_state import EngineState
from engine.state.request import Request, Sequence
from engine.state.spec import Table


class KvHandoffState(enum.Enum):
    """How far the keys and values of a request have come."""

    WAITING = "waiting"  # for an offer
    OFFERED = "offered"  # for room
    RESERVED = "reserved"  # room is there, parts are on their way
    STARTED = "started"  # all is here, the request decodes


@dataclass(eq=False)
class KvHandoff:
    """The KV of one request. `tokens` and `cross` are the wanted ranges of a reservation.

    `num_parts` of their parts have come: a sender waits for the receipt of one before it sends the next.
    """

    request: Request
    state: KvHandoffState = KvHandoffState.WAITING
    attempt: int = -1
    deadline_s: float = 0.0
    tokens: TokenRanges = field(default_factory=lambda: TokenRanges(0, 0))
    cross: TokenRanges = field(default_factory=lambda: TokenRanges(0, 0))
    num_parts: int = 0


@dataclass(eq=False)
class KvReceiver:
    """Handoffs of all requests of one engine with a prefill elsewhere. A reservation lasts `lease_s` from the last sign
    of life."""

    state: EngineState
    scheduler: DecoderScheduler
    inputs: InputReceiver
    offer_check: KvOfferCheck
    runner: DecoderRunner
    lease_s: float
    pending: list[KvHandoff] = field(default_factory=list)
    """OFFERED, in the order of grants."""
    reserved: list[KvHandoff] = field(default_factory=list)
    _handoffs: dict[str, KvHandoff] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counters = {"prefill_handoffs": 0, "prefill_handoff_tokens": 0, "prefill_handoff_cached_tokens": 0}
        self.counters |= {"prefill_handoff_bytes": 0, "kv_leases_expired": 0, "kv_parts_rejected": 0}
        self.counters |= {"kv_offers_expired": 0}
        self.early: EarlyOffers[KvOffer] = EarlyOffers(min(self.lease_s, KEEP_S))

    # --- requests come and go

    def add_request(self, request: Request) -> None:
        """Accept a request with a prefill elsewhere, and an offer that came before."""
        self._handoffs[request.request_id] = KvHandoff(request)
        early = self.early.pop(request.request_id, KV_INPUT_ID, request.attempt)
        if early is not None:
            self.offer(early)

    def end_request(self, request_id: str, request_attempt: int | None) -> None:
        """End a request in this attempt (None as in `EarlyOffers.forget`); cancel later offers and parts."""
        self.state.emit(*self.early.forget(request_id, request_attempt))
        handoff = self._handoffs.pop(request_id, None)
        if handoff is None:
            return
        if handoff.state is KvHandoffState.STARTED:  # its sender may not have heard that the last part is here
            self.state.emit(Grant(request_id, KV_INPUT_ID, handoff.attempt, "cancelled"))
        else:
            self._release(handoff)

    def pass_on(self, request: Request, sequence: Sequence) -> None:
        """Fork the blocks of an ending sequence to a sibling, while the request waits for KV."""
        sibling = next((one for one in request.sequences if one is not sequence), None)
        if sibling is not None and sequence.sequence_id in self.scheduler.blocks.tables:
            self.scheduler.blocks.fork(sequence.sequence_id, sibling.sequence_id)
            sibling.num_computed_tokens, sibling.num_remembered = sequence.num_computed_tokens, sequence.num_remembered

    # --- offers

    def offer(self, offer: KvOffer) -> None:
        """Handle an offer of KV. A repeated offer is a sign of life of the sender."""
        request_id, attempt, request_attempt = offer.request_id, offer.attempt, offer.request_attempt
        handoff = self._handoffs.get(request_id)
        if handoff is None or handoff.request.attempt < request_attempt:
            self.state.emit(*self.early.keep(offer))
        elif handoff.request.attempt > request_attempt:
            self.state.emit(Grant(request_id, KV_INPUT_ID, attempt, "cancelled"))
        elif handoff.state is KvHandoffState.STARTED:
            self.state.emit(Grant(request_id, KV_INPUT_ID, attempt, "cached"))
        elif attempt > handoff.attempt:
            self._accept(handoff, offer)
        elif attempt < handoff.attempt or handoff.state is KvHandoffState.WAITING:
            self.state.emit(Grant(request_id, KV_INPUT_ID, attempt, "cancelled"))
        elif handoff.state is KvHandoffState.RESERVED:
            self._grant(handoff)

    def withdraw(self, request_id: str, attempt: int) -> None:
        """Release exactly this attempt, silently: the owner of the prompt learns from the sender."""
        self.early.withdraw(request_id, KV_INPUT_ID, attempt)
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.attempt == attempt:
            self._release(handoff)

    def _accept(self, handoff: KvHandoff, offer: KvOffer) -> None:
        request = handoff.request
        fault = self.offer_check.fault(offer, request)
        # Never the client's fault: the prefill has read the same request, and has taken it.
        error = None if fault is None else ErrorInfo("internal_error", f"keys and values of the prompt: {fault}")
        if error is None:
            self._apply(request, offer)
            error = self.scheduler.capacity.never_fits(request)
        if error is not None:
            self.state.emit(Grant(request.request_id, KV_INPUT_ID, offer.attempt, "refused", error))
            return
        self._release(handoff)
        handoff.attempt, handoff.deadline_s = offer.attempt, offer.deadline_s
        handoff.state = KvHandoffState.OFFERED
        self.pending.append(handoff)
        self.pending.sort(key=lambda one: one.request.order)

    def _apply(self, request: Request, offer: KvOffer) -> None:
        """Apply the sender's knowledge of the request: input sizes, and the seed for random draws."""
        for item, layout in zip(request.inputs, offer.layouts, strict=True):
            if item.offer is None:
                item.offer = self.offer_check.input_offer(item, layout)
        request.expand_prompt()
        request.num_cached_tokens = offer.num_cached_tokens
        if request.sampling.seed is None:
            request.seed = offer.seed

    # --- reservations

    def grant(self) -> None:
        """Reserve blocks for offers in order, as far as possible."""
        self.scheduler.line_end = None
        for handoff in list(self.pending):
            if self.scheduler.blocks.awaits_cross(handoff.request.encoder_content):
                continue  # another request receives the same cross table: wait for it, instead of a second transfer
            reserved = self.scheduler.reserve(handoff.request)
            self.inputs.update(self.scheduler.pop_changed())  # of requests that made way
            if not reserved:
                self.scheduler.line_end = handoff.request
                return
            self.pending.remove(handoff)
            self._begin(handoff)

    def _begin(self, handoff: KvHandoff) -> None:
        """Start a reserved handoff: grant the missing ranges."""
        request, num_tokens = handoff.request, handoff.request.num_handoff_tokens
        num_cached = request.sequences[0].num_computed_tokens
        num_rows = request.num_encoder_tokens if self.scheduler.blocks.needs_writing(request.request_id) else 0
        handoff.state = KvHandoffState.RESERVED
        handoff.tokens, handoff.cross = TokenRanges(num_cached, num_tokens), TokenRanges(0, num_rows)
        handoff.num_parts = 0
        self.reserved.append(handoff)
        request.recorder.end("queue")
        request.recorder.start("handoff")
        self.counters["prefill_handoff_cached_tokens"] += num_cached
        if handoff.tokens.complete and handoff.cross.complete:
            self.state.emit(Grant(request.request_id, KV_INPUT_ID, handoff.attempt, "cached"))
            self._start(handoff)
        else:
            self._grant(handoff)

    def _grant(self, handoff: KvHandoff) -> None:
        """Emit the wanted ranges, and renew the lease."""
        handoff.deadline_s = time.monotonic() + self.lease_s
        request_id, first, cross_cached = handoff.request.request_id, handoff.tokens.first, handoff.cross.last == 0
        key = request_id, KV_INPUT_ID, handoff.attempt
        self.state.emit(Grant(*key, "granted", None, first, cross_cached, handoff.num_parts))

    # --- parts

    def deliver(self, request_id: str, attempt: int, part: KvPart) -> None:
        """Write a granted part into the blocks, in any order; reject any other part."""
        handoff = self._handoffs.get(request_id)
        key = request_id, KV_INPUT_ID, attempt
        if handoff is None:
            self._reject(Receipt(*key, "cancelled", part.number))
        elif attempt != handoff.attempt or handoff.state in (KvHandoffState.WAITING, KvHandoffState.OFFERED):
            self._reject(Receipt(*key, "expired", part.number))
        elif self.offer_check.part_fault(part) is not None:
            self._reject(Receipt(*key, "corrupt", part.number))
        elif handoff.state is KvHandoffState.STARTED:
            self.state.emit(Receipt(*key, "stored", part.number))  # sent twice: the first one counts
        elif not self._wanted(handoff, part.table).within(part.first, part.last):
            self._reject(Receipt(*key, "corrupt", part.number))
        else:
            self._store(handoff, part)
            self.state.emit(Receipt(*key, "stored", part.number))
            if handoff.tokens.complete and handoff.cross.complete:
                self._start(handoff)

    def _reject(self, event: Receipt) -> None:
        self.counters["kv_parts_rejected"] += 1
        self.state.emit(event)

    def _wanted(self, handoff: KvHandoff, table: Table) -> TokenRanges:
        return handoff.tokens if table == "self" else handoff.cross

    def _store(self, handoff: KvHandoff, part: KvPart) -> None:
        handoff.deadline_s = time.monotonic() + self.lease_s
        request, wanted = handoff.request, self._wanted(handoff, part.table)
        if wanted.has(part.first, part.last):
            return
        own = self.scheduler.blocks.tables[request.sequences[0].sequence_id]
        blocks = own if part.table == "self" else self.scheduler.blocks.get_cross_block_table(request.request_id)
        self.runner.move(self.scheduler.blocks.pop_moves())  # they may still read what is overwritten now
        self.runner.write_tokens(part.table, blocks, part.first, part.tokens)
        wanted.add(part.first, part.last)
        handoff.num_parts = max(handoff.num_parts, part.number + 1)
        self.counters["prefill_handoff_bytes"] += part.tokens.nbytes
        if part.table == "self":
            self.counters["prefill_handoff_tokens"] += len(part.tokens)
        elif wanted.complete:
            self.scheduler.blocks.mark_written(request.request_id)

    def _start(self, handoff: KvHandoff) -> None:
        """Start a request with complete KV, as if computed here."""
        request = handoff.request
        handoff.state = KvHandoffState.STARTED
        self.reserved.remove(handoff)
        self.counters["prefill_handoffs"] += 1
        request.sequences[0].num_computed_tokens = request.num_handoff_tokens
        request.awaits_kv = False
        request.recorder.end("handoff")
        request.recorder.start("decode")
        self.scheduler.start(request)
        self.inputs.update(self.scheduler.pop_changed())
        self.inputs.ask(request)

    # --- deadlines

    def deadlines_s(self) -> list[float]:
        return [one.deadline_s for one in (*self.pending, *self.reserved)] + self.early.deadlines_s()

    def expire(self, now_s: float) -> None:
        """End leases and offers past their deadline: the prompt has to be computed again."""
        self.state.emit(*self.early.expire(now_s))
        for handoff in [one for one in (*self.pending, *self.reserved) if one.deadline_s <= now_s]:
            what = "kv_leases_expired" if handoff.state is KvHandoffState.RESERVED else "kv_offers_expired"
            self.counters[what] += 1
            self._release(handoff)
            request = handoff.request
            self.state.emit(InputNeeded(request.request_id, KV_INPUT_ID, handoff.attempt, request.attempt))

    def _release(self, handoff: KvHandoff) -> None:
        """End the current attempt, and free the blocks."""
        if handoff.state is KvHandoffState.OFFERED:
            self.pending.remove(handoff)
        elif handoff.state is KvHandoffState.RESERVED:
            self.reserved.remove(handoff)
            self.scheduler.release(handoff.request)
            handoff.request.recorder.end("handoff")
        else:
            return
        handoff.state = KvHandoffState.WAITING
        self.state.emit(Grant(handoff.request.request_id, KV_INPUT_ID, handoff.attempt, "cancelled"))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queues and states agree, and reservations match the blocks held."""
        for state, listed in (KvHandoffState.OFFERED, self.pending), (KvHandoffState.RESERVED, self.reserved):
            inside = [one for one in self._handoffs.values() if one.state is state]
            if set(map(id, inside)) != set(map(id, listed)) or len(inside) != len(listed):
                raise IntegrityError(f"{len(inside)} handoffs are {state.value}, {len(listed)} are listed")
        if {one.request.request_id for one in self.reserved} != {one.request_id for one in self.scheduler.reserved}:
            raise IntegrityError("the scheduler's reservations are not those of the handoffs")
        for handoff in self._handoffs.values():
            holds = handoff.request.sequences[0].sequence_id in self.scheduler.blocks.tables
            if handoff.state is not KvHandoffState.STARTED and holds != (handoff.state is KvHandoffState.RESERVED):
                raise IntegrityError(f"a handoff that is {handoff.state.value} has blocks, or should have some")

    def is_empty(self) -> bool:
        return not (self._handoffs or self.pending or self.early)
