"""The sender's half of the handoff between prefill and decode.

A prefill runs as any request does, up to its last token but one, and keeps its blocks until it is told to end. On the
way it tells what a sender has to know: `KvReady` once nothing but computing is left, `KvComputed` as far as it is.

Progress. A receiver reserves room for whole prompts; if it waited for one prefill while that waited for blocks which
others hold here, waiting for room there, nobody would move. So a prefill that has been granted goes before all that
have not, and may take their blocks. The first of those granted can have the whole pool, so it is computed, sent and
ended; then it is the next one's turn. Reservations thus come to their end, and with them what waits for room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import Prefilled
from engine.device.pending_tensor import PendingTensor
from engine.handoff.offer_check import KvOfferCheck
from engine.runner.decoder import DecoderRunner
from engine.scheduler.decoder import DecoderScheduler
from engine.state.engine_state import EngineState
from engine.state.events import KvComputed, KvReady
from engine.state.inputs import ScheduledStep
from engine.state.request import Request
from engine.state.spec import Table


@dataclass(eq=False)
class KvExporter:
    """Prefills of one engine for decodes elsewhere."""

    state: EngineState
    scheduler: DecoderScheduler
    offer_check: KvOfferCheck
    runner: DecoderRunner
    _requests: dict[str, Request] = field(default_factory=dict)
    _unready: dict[str, Request] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)
    _granted: set[str] = field(default_factory=set)
    _ending: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.counters = {"prefills_ended": 0, "kv_exported_bytes": 0}

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = self._unready[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
        self._unready.pop(request_id, None)
        for names in (self._complete, self._granted, self._ending):
            names.discard(request_id)

    def settle(self) -> list[Request]:
        """Emit KvReady for prefills that have begun and lack no input. Returns prefills that end now."""
        finished = []
        for request in list(self._unready.values()):
            begun = request.sequences[0].sequence_id in self.scheduler.blocks.tables
            if not begun or not request.is_prompt_known or request.next_missing_input is not None:
                continue
            del self._unready[request.request_id]
            self.state.emit(KvReady(request.request_id, self.offer_check.describe(request), request.attempt))
            if not self.scheduler.blocks.needs_writing(request.request_id):
                finished += self._report(request)
        return finished

    def report(self, step: ScheduledStep) -> list[Request]:
        """Emit progress after a step, for tokens computed or back from the host. Returns prefills that end now."""
        if not self._requests:
            return []
        finished = []
        for request in dict.fromkeys((*step.admitted, *(sequence.request for sequence in step.sequences))):
            if request.request_id in self._requests and request.request_id not in self._unready:
                finished += self._report(request)
        return finished + self.settle()

    def _report(self, request: Request) -> list[Request]:
        """Emit the progress of a prefill; return the prefill if it ends now."""
        num_computed = min(request.sequences[0].num_computed_tokens, request.num_handoff_tokens)
        self.state.emit(KvComputed(request.request_id, num_computed, request.attempt))
        if request.is_prefilled_here and request.request_id not in self._complete:
            self._complete.add(request.request_id)
            request.recorder.end("inputs", "prefill")
            request.recorder.start("handoff")
            if request.request_id in self._ending:
                return self._finish(request)
        return []

    def grant(self, request_id: str) -> None:
        """Put a granted prefill before all prefills without a grant."""
        request = self._requests.get(request_id)
        if request is not None and request_id not in self._granted:
            self._granted.add(request_id)
            request.go_first()
            self.scheduler.reorder(request)

    def export(self, request_id: str, table: Table, first: int, last: int) -> PendingTensor | None:
        """Return the KV of tokens `first` to `last` (not included), [last - first, layers, 2, num_kv_heads, head_dim];
        None while not in the cache."""
        request = self._requests.get(request_id)
        if request is None or request.sequences[0].sequence_id not in self.scheduler.blocks.tables:
            return None
        sequence = request.sequences[0]
        if table == "self":
            there, blocks = sequence.num_computed_tokens, self.scheduler.blocks.tables[sequence.sequence_id]
        else:
            there = 0 if self.scheduler.blocks.needs_writing(request_id) else request.num_encoder_tokens
            blocks = self.scheduler.blocks.get_cross_block_table(request_id)
        if not 0 <= first < last <= there:
            return None
        tokens = self.runner.read_tokens(table, blocks, first, last)
        self.counters["kv_exported_bytes"] += tokens.nbytes
        return tokens

    def end(self, request_id: str) -> list[Request]:
        """End a prefill, once requested prompt log-probabilities are complete. Returns the prefill if it ends now."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._ending.add(request_id)
        if request.sampling.prompt_logprobs is None or request_id in self._complete:
            return self._finish(request)
        return []

    def _finish(self, request: Request) -> list[Request]:
        self.counters["prefills_ended"] += 1
        spans = request.finish_spans()
        self.state.emit(Prefilled(request.request_id, request.attempt, None, spans, request.prompt_logprobs))
        return [request]
