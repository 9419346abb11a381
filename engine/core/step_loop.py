"""The loop of `DecoderEngine.step`: plain, or with the next step launched before the last tokens are known.

    plain       host    schedule N · launch N · wait for N ............... · tell N · schedule N+1 · launch N+1 · ...
                device                        ██ N ██ choose N ██                                  ██ N+1 ██ choose ...

    overlapped  host    schedule N+1 · launch N+1 · wait for N · tell N · schedule N+2 · launch N+2 · wait ...
                device  ██ N ██████ choose N ██ N+1 ████████████████ choose N+1 ██ N+2 ████████████████ choose ...

Overlapped, the loop is at most one step ahead. What changes when:

    at launch                                        when the tokens are known
    blocks are taken, num_computed_tokens grows      a token takes the place of its UNKNOWN_TOKEN
    UNKNOWN_TOKEN is appended for each new token     it is told; where it ends its sequence, blocks and slot are free,
    the prompt forks, inputs are consumed            and what the step ahead computes for that one is dropped
    blocks full of known tokens can be found         so can those that have become so (prefix cache)
    keys and values may be read and sent: the        the sequence may be preempted, and its tokens hashed or computed
    device does what is queued in its order          again

Where the host has a part in choosing a step's tokens (beams, rules that read tokens), where a request asks for
log-probabilities of its prompt, or may outgrow the pool, tokens are known before the next step is scheduled. Where a
sequence with unknown tokens would have to be preempted, the scheduler holds back and the next step waits for them. That
a sequence reaches its greatest length is known beforehand; an end by a token or a stop string is not, and costs a
surplus token. The tokens are the same as without overlap.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import ErrorInfo
from common.messages import Failed
from common.telemetry import get_logger
from engine.core.decoding import BeamsEnded, Decoding, NewToken, TokensInFlight
from engine.core.output_processor import OutputProcessor
from engine.device.h2d import select_rows
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.kv_exporter import KvExporter
from engine.handoff.kv_receiver import KvReceiver
from engine.models.lora.pool import AdapterPool
from engine.runner.decoder import DecoderRunner, StepOutput
from engine.scheduler.capacity import adapters_of
from engine.scheduler.decoder import DecoderScheduler
from engine.state.engine_state import EngineState
from engine.state.inputs import ScheduledStep
from engine.state.request import Request, Sequence

log = get_logger()


@dataclass(eq=False)
class StepLoop:
    """Drives the parts of an engine; `ahead` lets steps overlap."""

    state: EngineState
    runner: DecoderRunner
    scheduler: DecoderScheduler
    input_receiver: InputReceiver
    kv_receiver: KvReceiver
    kv_exporter: KvExporter
    decoding: Decoding
    output: OutputProcessor
    ahead: bool
    in_flight: TokensInFlight | None = None
    """Tokens of a launched step that are not known yet."""
    last_step_tokens: int = 0
    _launched: tuple[ScheduledStep, float] | None = None  # whose tokens are in flight; seconds of its launch
    _waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.counters = {"steps": 0, "steps_ahead": 0, "surplus_tokens": 0, "recomputed_tokens": 0}
        self.counters |= {"requests_failed": 0}

    def step(self) -> bool:
        """Expire, grant, schedule and launch a step, and emit new tokens.

        Returns whether there may be more to do even if nothing comes.
        """
        began_s, was_in_flight, self._waited_s = time.perf_counter(), self.in_flight is not None, 0.0
        step = self._step()
        again = True if was_in_flight and not step.sequences else self._make_room(step)
        self.end(*self.kv_exporter.report(step))
        self.last_step_tokens = sum(step.num_tokens)
        self._observe(step, time.perf_counter() - began_s)
        return again

    def _observe(self, step: ScheduledStep, seconds: float) -> None:
        """Tell the pace how long a step took: its launch and the wait for its tokens, in two turns if it ran ahead."""
        launched = step, seconds - self._waited_s
        ended, self._launched = (launched, None) if self.in_flight is None else (self._launched, launched)
        if self.scheduler.pace is not None and ended is not None and ended[0].sequences:
            works_meanwhile = self.runner.device.type != "cpu"
            self.scheduler.pace.observe(ended[0], ended[1] + self._waited_s, ended[1] if works_meanwhile else 0.0)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began_s

    # --- the loop

    def _step(self) -> ScheduledStep:
        if self.scheduler.held_back:
            self._collect()
        step = self._schedule()
        if not step.sequences:
            self._collect()
            return step
        output = self._run(step)
        self.counters["steps_ahead"] += self.in_flight is not None
        if not (self.ahead and self.decoding.can_run_ahead(output)):
            if self.in_flight is not None:
                self._collect()
                output = self._without_ended(output)
            self._choose(output)
            return step
        launched = self._launch(output)
        self._collect(launched)
        alive = _requests_of(sequence for sequence in launched.sequences if self.state.is_alive(sequence))
        if not all(map(self.output.fits_ever, alive)):  # a request may outgrow the pool
            self._collect()
        return step

    # --- the parts of a step

    def settle_inputs(self) -> None:
        """End expired leases and grant free memory, for inputs and for KV."""
        now_s = time.monotonic()
        self.input_receiver.expire(now_s)
        self.input_receiver.grant()
        self.kv_receiver.expire(now_s)
        self.kv_receiver.grant()
        self.end(*self.kv_exporter.settle())

    def _schedule(self) -> ScheduledStep:
        self.settle_inputs()
        step = self.scheduler.schedule()
        self.input_receiver.update(self.scheduler.pop_changed())
        moves = self.scheduler.blocks.pop_moves()
        if moves:
            self.runner.move(moves)
        return step if self.runner.adapters is None else self._with_adapters(step, self.runner.adapters)

    def _with_adapters(self, step: ScheduledStep, pool: AdapterPool) -> ScheduledStep:
        """Load the adapters of all requests that hold memory; those with one that cannot be read fail, and leave."""
        holders = [*self.scheduler.running, *self.scheduler.reserved]
        failed = pool.load(adapters_of(holders))
        for request in holders if failed else ():
            if request.sampling.adapter in failed:
                self.fail(request, failed[request.sampling.adapter])
        kept = [index for index, one in enumerate(step.sequences) if one.sampling.adapter not in failed]
        admitted = [request for request in step.admitted if request.sampling.adapter not in failed]
        return ScheduledStep([step.sequences[at] for at in kept], [step.num_tokens[at] for at in kept], admitted)

    def _run(self, step: ScheduledStep) -> StepOutput:
        """Launch the forward pass and count the tokens as computed, for every later launch."""
        for request in step.admitted:
            request.recorder.end("queue")
            if request.num_preemptions == 0:
                request.recorder.start("prefill")
                log.debug("prefill begun", request=request.request_id)
        self.runner.buffers.acquire_slots(step.sequences)
        output = self.runner.run(step, self.scheduler.blocks, self.input_receiver.cache)
        self.counters["steps"] += 1
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            if sequence.num_computed_tokens < sequence.num_lost_tokens:
                self.counters["recomputed_tokens"] += min(
                    count, sequence.num_lost_tokens - sequence.num_computed_tokens
                )
            sequence.num_computed_tokens += count
        for request in _requests_of(step.sequences):
            self.input_receiver.consume(request)
            self.scheduler.cache_lookup.remember(request)
        return output

    def _choose(self, output: StepOutput) -> None:
        with self._waiting():
            results = self.decoding.choose(output)
        for result in results:
            if isinstance(result, NewToken):
                if self.state.is_alive(result.sequence):  # else a sibling has failed in this step
                    self._emit_token(result)
            elif self.state.requests.get(result.request.request_id) is not result.request:
                continue  # the request has failed in this step
            elif isinstance(result, BeamsEnded):
                messages = self.output.beams(result)
                self.end(result.request)
                self.state.emit(*messages)
            else:
                self.fail(result.request, result.error)

    def _emit_token(self, new: NewToken) -> None:
        message = self.output.token(new)
        if message.done:
            self.end(new.sequence.request)
        self.state.emit(message)

    def _make_room(self, step: ScheduledStep) -> bool:
        """Make room for waiting requests. If no request could run, a request may have to yield."""
        if not step.sequences:
            freed = self.input_receiver.revoke(only_blocked=False)
            freed = freed or (not self.input_receiver.granted and self.scheduler.yield_blocks())
            self.input_receiver.update(self.scheduler.pop_changed())
            return freed
        self.input_receiver.grant()
        self.kv_receiver.grant()
        if self.input_receiver.revoke(only_blocked=True):
            self.input_receiver.grant()
        return self.input_receiver.is_stuck  # if nothing runs next time, the branch above decides

    # --- tokens in flight

    def _launch(self, output: StepOutput) -> TokensInFlight:
        """Choose the tokens of a step on the device, for the next step to read in place."""
        in_flight = self.decoding.launch(output)
        self.runner.buffers.acquire_slots(in_flight.sequences)
        slots = [sequence.slot_index for sequence in in_flight.sequences]
        self.runner.last_tokens.put(slots, in_flight.tokens.on_device)
        for sequence in in_flight.sequences:
            sequence.is_full = self.output.is_full(sequence, len(sequence.token_ids))
        return in_flight

    def _collect(self, launched: TokensInFlight | None = None) -> None:
        """Emit the tokens in flight once known; the step just `launched` is in flight afterwards."""
        in_flight, self.in_flight = self.in_flight, launched
        if launched is None:
            self.scheduler.held_back = False
        if in_flight is None:
            return
        with self._waiting():
            tokens = self.decoding.collect(in_flight)
        for new in tokens:
            if self.state.is_alive(new.sequence):
                self._emit_token(new)
            else:
                self.counters["surplus_tokens"] += 1
        for request in _requests_of(sequence for sequence in in_flight.sequences if self.state.is_alive(sequence)):
            self.scheduler.cache_lookup.remember(request)

    def _without_ended(self, output: StepOutput) -> StepOutput:
        """Keep the rows of live sequences: the previous step's tokens may have ended others."""
        rows = [row for row, sequence in enumerate(output.sequences) if self.state.is_alive(sequence)]
        self.counters["surplus_tokens"] += len(output.sequences) - len(rows)
        if len(rows) == len(output.sequences):
            return output
        sequences = [output.sequences[row] for row in rows]
        return StepOutput(sequences, select_rows(output.logits, rows), output.prompt_rows)

    # --- ends

    def end(self, *requests: Request) -> None:
        """Free everything that live requests hold. Unfinished handoffs are cancelled."""
        for request in requests:
            self.kv_receiver.end_request(request.request_id, request.attempt)
            self.scheduler.remove(request)
            self.input_receiver.end_request(request)
            self.kv_exporter.forget(request.request_id)
            del self.state.requests[request.request_id]
            self.state.has_changed = True

    def fail(self, request: Request, error: ErrorInfo) -> None:
        """End a live request with an error."""
        self.end(request)
        self.counters["requests_failed"] += 1
        self.state.emit(Failed(request.request_id, error, request.attempt))


def _requests_of(sequences: Iterable[Sequence]) -> Iterable[Request]:
    """Return the distinct requests in order."""
    return dict.fromkeys(sequence.request for sequence in sequences)
