"""The decoder's engine: requests, offers and tensors in, events out; one call of `step` is one forward pass.

    add_request / offer / deliver / abort  ->  intake and scheduler  ->  runner  ->  events

One thread drives it. It knows no network: `LLM` drives it in one process, a worker's engine thread in a cluster.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
import warnings
from collections.abc import Sequence as ListOf

import numpy as np
import torch

from common.config import EngineConfig
from common.errors import ErrorInfo, TriptychError
from common.messages import FinishReason, InputSlot, Resumed, TokenLogprob
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool, IntegrityError
from engine.cache.encoder_cache import EncoderCacheManager
from engine.counters import encoder_computations
from engine.device import DTYPES
from engine.events import Event, InputMetadata, RequestFailed, TokensReady
from engine.generation import BeamsEnded, Generation, GenerationFailed, NewToken
from engine.request import Request, Sequence
from engine.request_check import RequestCheck
from engine.runner.decoder import DecoderRunner
from engine.sampling.sampler import Sampler
from engine.scheduler.coverage import Coverage
from engine.scheduler.decoder import DecoderScheduler, ScheduledStep
from engine.scheduler.expectation import InputExpectation
from engine.scheduler.intake import InputIntake

LEASE_S = 30.0

# Received tensors are views of the message they came in, and only ever read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


class DecoderEngine:
    """Prefill and decode of one model on one device. Loads decoder weights only.

    Raises TriptychError where the model or the configuration cannot be served. After that, errors of a request come
    as `RequestFailed` events, and its neighbours do not notice.
    """

    def __init__(
        self, info: ModelInfo, config: EngineConfig, instance: str = "engine", lease_s: float = LEASE_S
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.info, self.config, self.instance = info, config, instance
        self.runner = DecoderRunner(info, config)
        self.cache = EncoderCacheManager(self.runner.memory.encoder_cache)
        host_pool = BlockPool(self.runner.num_host_blocks + 1) if self.runner.num_host_blocks else None
        self.blocks = BlockManager(BlockPool(self.runner.num_blocks), config.block_size, host_pool)
        self.coverage = Coverage(self.blocks, enabled=config.prefix_caching)
        self.intake = InputIntake(self.cache, self._expectation(), self.coverage, lease_s)
        self.scheduler = DecoderScheduler(
            self.blocks,
            self.intake,
            self.coverage,
            self._free_slots,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.preemption,
        )
        self.sampler = Sampler(info, self.runner.spec.vocab_size)
        self.generation = Generation(self.runner, self.blocks, self.sampler, self._drop, info.eos_token_ids)
        self._limits = RequestCheck(
            info,
            self.runner.spec.vocab_size,
            self.runner.max_model_len,
            min(config.max_num_seqs, config.max_num_batched_tokens),
        )
        self.counters = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0, "requests": 0, "requests_failed": 0}
        self._requests: dict[str, Request] = {}
        self._dirty = False
        self._last_step_tokens = 0

    def _expectation(self) -> InputExpectation:
        spec, info = self.runner.spec, self.info
        max_rows = info.max_encoder_tokens if info.has_cross_attention else self.runner.max_model_len
        return InputExpectation(
            spec.encoder_width, spec.vocab_size, max_rows, info.placeholder_token_id, info.has_cross_attention
        )

    # --- in

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        inputs: list[InputSlot],
        sampling: SamplingParams,
        priority: int = 0,
        resumed: ListOf[Resumed] = (),
    ) -> None:
        """Take a request. What is wrong with it comes as a RequestFailed event; a known id is ignored."""
        if request_id in self._requests:
            return
        self._dirty = True
        self.counters["requests"] += 1
        try:
            self._check_load()
            self._limits.check(prompt_token_ids, inputs, sampling)
            self.sampler.check(sampling)
        except TriptychError as error:
            self.intake.forget(request_id)
            self._emit_failure(request_id, error.info)
            return
        request = Request.create(
            request_id,
            prompt_token_ids,
            inputs,
            sampling=sampling,
            arrival=self.counters["requests"],
            priority=priority,
            seed=sampling.seed if sampling.seed is not None else random.getrandbits(62),
            is_encoder_decoder=self.info.is_encoder_decoder,
            cross_attention=self.info.has_cross_attention,
            uses_mrope=self.runner.spec.mrope_section is not None,
            instance=self.instance,
            resumed=() if sampling.uses_beams else tuple(resumed),
        )
        request.recorder.start("queue")
        if request.next_missing_input is not None:
            request.recorder.start("inputs")
        self._requests[request_id] = request
        self.scheduler.add(request)
        self.intake.add_request(request)
        self._fail_what_never_fits(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free everything it holds. Unknown ids are remembered as ended."""
        self._dirty = True
        request = self._requests.get(request_id)
        if request is None:
            self.intake.forget(request_id)
        else:
            self._end(request)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """One sequence of a request goes no further (a stop string): with the last one the request ends, silently."""
        request = self._requests.get(request_id)
        sequence = next((one for one in request.sequences if one.index == index), None) if request else None
        if request is None or sequence is None or request.sampling.uses_beams:
            return
        if len(request.sequences) == 1:
            self.abort(request_id)
            return
        self._dirty = True
        self._drop(sequence)
        request.sequences.remove(sequence)

    def offer(self, request_id: str, input_id: int, attempt: int, metadata: InputMetadata, deadline_s: float) -> None:
        """An encoder offers an input. The answer is an event: granted, cached, refused or cancelled."""
        self._dirty = True
        self.intake.offer(request_id, input_id, attempt, metadata, deadline_s)
        request = self._requests.get(request_id)
        if request is not None:
            self._fail_what_never_fits(request)

    def deliver(self, request_id: str, input_id: int, attempt: int, tensor: torch.Tensor) -> None:
        """A granted tensor has come: [num_encoder_tokens, hidden_size]."""
        self._dirty = True
        self.intake.deliver(request_id, input_id, attempt, tensor)
        request = self._requests.get(request_id)
        if request is not None and request.next_missing_input is None:
            request.recorder.end("inputs")

    def deliver_bytes(
        self, request_id: str, input_id: int, attempt: int, shape: tuple[int, ...], dtype: str, data: memoryview
    ) -> None:
        """The same from raw bytes, at any address. They are copied, into the tensor that the cache keeps."""
        torch_dtype = DTYPES.get(dtype)
        size = math.prod(shape)
        if torch_dtype is None or size * torch_dtype.itemsize != len(data) or size == 0:
            tensor = torch.empty(0)  # not what any grant says: rejected as corrupt
        else:
            tensor = torch.empty(shape, dtype=torch_dtype)
            tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        self.deliver(request_id, input_id, attempt, tensor)

    # --- one step

    def has_work(self) -> bool:
        """True if `step` would do something now."""
        return self._dirty or bool(self.intake.events) or self.scheduler.has_work()

    def next_deadline_s(self) -> float | None:
        """When `step` has to be called again even if nothing comes (Unix time)."""
        return self.intake.next_deadline_s()

    def answer(self) -> list[Event]:
        """What can be told without a forward pass: grants, receipts, ends of leases. Encoders wait for these."""
        self._settle_inputs()
        return self._take_events()

    def step(self) -> list[Event]:
        """Expire, grant, schedule, run one forward pass, and return what happened."""
        self._dirty = False
        self._settle_inputs()
        step = self.scheduler.schedule()
        self.runner.move(self.blocks.take_moves())
        if step.sequences:
            self._run(step)
            self.intake.grant()
            if self.intake.take_back(only_blocked=True):
                self.intake.grant()
            self._dirty = self._dirty or self.intake.is_stuck  # if nothing runs next time, the branch below decides
        elif self.intake.take_back(only_blocked=False) or (
            self.intake.num_granted == 0 and self.scheduler.yield_blocks()
        ):
            self._dirty = True
        self._last_step_tokens = sum(step.num_tokens)
        return self._take_events()

    def _settle_inputs(self) -> None:
        self.intake.expire(time.time())
        self.intake.grant()

    def _take_events(self) -> list[Event]:
        events, self.intake.events = self.intake.events, []
        return events

    def _run(self, step: ScheduledStep) -> None:
        for request in step.admitted:
            request.recorder.end("queue")
            if request.num_preemptions == 0:
                request.recorder.start("prefill")
        for sequence in step.sequences:
            if sequence.slot_index < 0:
                sequence.slot_index = self.runner.buffers.take_slot()
        output = self.runner.run(step, self.blocks, self.cache)
        self.counters["steps"] += 1
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            sequence.num_computed_tokens += count
        for request in dict.fromkeys(sequence.request for sequence in step.sequences):
            self.intake.consume(request)
            self.coverage.remember(request)
        for result in self.generation.advance(output):
            if isinstance(result, BeamsEnded):
                self._emit_beams(result)
            elif isinstance(result, GenerationFailed):
                self._fail(result)
            elif result.sequence.request.request_id in self._requests:  # else a sibling has failed in this step
                self._emit_token(result)

    def _emit_token(self, new: NewToken) -> None:
        sequence, request = new.sequence, new.sequence.request
        self._count_tokens(request, 1)
        offset, reason = sequence.num_output_tokens - 1, self._finish_reason(sequence, new.token_id)
        if reason is not None:
            self._drop(sequence)
            request.sequences.remove(sequence)
        event = TokensReady(
            request.request_id,
            offset,
            [new.token_id],
            reason,
            len(request.prompt),
            num_cached_tokens=request.num_cached_tokens,
            index=sequence.index,
            logprobs=[] if new.logprob is None else [new.logprob],
            prompt_logprobs=self._take_prompt_logprobs(request),
        )
        self._emit(request, event, done=not request.sequences)

    def _fail(self, failed: GenerationFailed) -> None:
        if failed.request.request_id in self._requests:
            self._end(failed.request)
            self._emit_failure(failed.request.request_id, failed.error)

    def _emit_beams(self, ended: BeamsEnded) -> None:
        """All hypotheses of a beam search at once: nothing of one is certain before its end."""
        request = ended.request
        for index, one in enumerate(ended.hypotheses):
            self._count_tokens(request, len(one.token_ids))
            ends = (*self.info.eos_token_ids, *request.sampling.stop_token_ids)
            event = TokensReady(
                request.request_id,
                0,
                one.token_ids,
                "stop" if one.token_ids[-1] in ends else "length",
                len(request.prompt),
                num_cached_tokens=request.num_cached_tokens,
                index=index,
                prompt_logprobs=self._take_prompt_logprobs(request),
                score=one.score,
            )
            self._emit(request, event, done=index == len(ended.hypotheses) - 1)

    def _emit(self, request: Request, event: TokensReady, *, done: bool) -> None:
        if done:
            event = dataclasses.replace(event, done=True, spans=request.finish_spans())
            self._end(request)
        self.intake.events.append(event)

    def _count_tokens(self, request: Request, count: int) -> None:
        self.counters["generated_tokens"] += count
        if not request.has_output:
            request.has_output = True
            request.recorder.end("inputs")
            request.recorder.end("prefill")
            request.recorder.start("decode")
            self.counters["prompt_tokens"] += len(request.prompt)

    def _take_prompt_logprobs(self, request: Request) -> list[TokenLogprob | None]:
        found, request.prompt_logprobs = request.prompt_logprobs, []
        request.prompt_logprobs_told = request.prompt_logprobs_told or bool(found)
        return found

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        request, params = sequence.request, sequence.sampling
        in_prefix = sequence.num_output_tokens <= len(params.prefix_allowed)
        if token_id in params.stop_token_ids and not in_prefix:
            return "stop"
        if token_id in self.info.eos_token_ids and not params.ignore_eos and not in_prefix:
            return "stop"
        length = len(sequence.token_ids)
        if sequence.num_output_tokens >= params.max_tokens or length >= self.runner.max_model_len:
            return "length"
        # What outgrows the whole pool ends here: preempting it would only make it start over, forever.
        return None if self._fits_ever(request) else "length"

    def _fits_ever(self, request: Request) -> bool:
        """Whether all sequences of a request can take one more step, with the whole pool to themselves."""
        lengths = [len(sequence.token_ids) for sequence in request.sequences]
        return self.blocks.fits_ever(len(request.prompt), lengths, request.num_encoder_tokens)

    # --- ends

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._free_slots(request)
        self.intake.end_request(request)
        self.generation.forget(request.request_id)
        del self._requests[request.request_id]
        self._dirty = True

    def _drop(self, sequence: Sequence) -> None:
        """A sequence goes no further: its blocks and its slot are free."""
        self.blocks.free(sequence.sequence_id)
        self._free_slot(sequence)

    def _free_slots(self, request: Request) -> None:
        for sequence in request.sequences:
            self._free_slot(sequence)

    def _free_slot(self, sequence: Sequence) -> None:
        if sequence.slot_index >= 0:
            self.runner.buffers.release_slot(sequence.slot_index)
            sequence.slot_index = -1

    def _check_load(self) -> None:
        if len(self._requests) >= self.config.max_waiting + self.config.max_num_seqs:
            raise TriptychError("overloaded", f"{len(self._requests)} requests are waiting or running: try again later")

    def _emit_failure(self, request_id: str, error: ErrorInfo) -> None:
        self.counters["requests_failed"] += 1
        self.intake.events.append(RequestFailed(request_id, error))

    def _fail_what_never_fits(self, request: Request) -> None:
        error = self._limits.never_fits(request, self.blocks)
        if error is not None:
            self._end(request)
            self._emit_failure(request.request_id, error)

    # --- how it is doing

    def is_empty(self) -> bool:
        """True if no request, reservation, reference or block is held."""
        return not self._requests and self.intake.is_empty() and self.blocks.num_used == 0

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, cache entries and slots add up."""
        self.blocks.check_integrity()
        self.cache.check_integrity()
        everyone = (sequence for request in self._requests.values() for sequence in request.sequences)
        held = sum(1 for sequence in everyone if sequence.slot_index >= 0)
        if held + self.runner.buffers.num_free_slots != self.config.max_num_seqs:
            raise IntegrityError(f"{held} slots held, {self.runner.buffers.num_free_slots} free")

    def stats(self) -> dict[str, float]:
        """Gauges and counters of this moment; counters end in `_total`."""
        gauges: dict[str, float] = {
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "kv_blocks_usable": self.blocks.pool.num_usable,
            "kv_blocks_free": self.blocks.num_free,
            "kv_blocks_used": self.blocks.num_used,
            "kv_blocks_cached": self.blocks.num_cached,
            "kv_host_blocks_free": self.blocks.num_host_free,
            "kv_block_bytes": self.runner.block_bytes,
            "encoder_cache_bytes_capacity": self.cache.capacity_bytes,
            "encoder_cache_bytes_used": self.cache.used_bytes,
            "encoder_cache_bytes_peak": self.cache.peak_bytes,
            "encoder_cache_references": self.cache.num_references,
            "inputs_pending": self.intake.num_pending,
            "inputs_granted": self.intake.num_granted,
            "last_step_tokens": self._last_step_tokens,
            "weight_bytes": self.runner.load_report.parameter_bytes,
            "encoder_computations": encoder_computations.value,
            **self.runner.memory.stats(),
        }
        totals = {**self.counters, **self.intake.counters}
        totals |= {**self.scheduler.counters, **self.blocks.counters, **self.coverage.counters}
        totals |= {"encoder_cache_evictions": self.cache.evictions, "encoder_cache_hits": self.cache.hits}
        return gauges | {f"{name}_total": float(value) for name, value in totals.items()}
