"""Load a decoder, and size its pools by the peak memory of its largest step, measured through the real runner.

    prefill   max_num_batched_tokens tokens, the last ones of sequences at full length, whose blocks lie scattered
    logits    of max_num_seqs sequences, sampled with every filter
    graphs    recorded steps, which keep what they use

A step that would take long is measured smaller and scaled: both parts grow with their number of rows, and the layers
of a model use the same memory one after the other. So no model is held up for much longer than `TIME_S`.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Final, cast

import msgspec
import torch

from common.config import EngineConfig
from common.messages import InputLayout, InputSlot, Offer
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from common.telemetry import get_logger
from engine.cache.block_manager import BlockManager
from engine.cache.encoder_cache import EncoderCacheManager
from engine.device.memory import DecoderNeeds, MemoryReport, all_pools_given, size_decoder, zeros
from engine.device.memory_profiler import PeakMemory, extrapolate, one_layer_of_each_stack, release_free_memory
from engine.runner.decoder import DecoderRunner
from engine.runner.graphs import StepGraphs, UnrecordableError
from engine.sampling.sampler import Sampler
from engine.state.inputs import ScheduledStep
from engine.state.request import InputState, Request, RequestInput, Sequence

log = get_logger()

TIME_S: Final = 0.1
"""After this only the first layer is computed to its end."""
LAYER_FLOP: Final = 4e9
"""Of one layer on a CPU: a twentieth of a second on two idle cores."""
LEAST_ROWS: Final = 128
"""Rows of a prompt that are measured in any model: with a few of them, products take other ways through libraries."""
SAMPLED_VALUES: Final = 2**19
"""Logits that are sampled on a CPU: sorting them takes a twentieth of a second."""
LEAST_SEQS: Final = 8
"""Sequences that are sampled in any model: a quarter of them, measured too, is more than one."""
WARM_UP_TOKENS: Final = 16
_FILTERS: Final = SamplingParams(temperature=1.0, top_p=0.9, top_k=0, max_tokens=1, logprobs=1, presence_penalty=0.1)


def load_runner(info: ModelInfo, config: EngineConfig, beside_bytes: int = 0) -> DecoderRunner:
    """Load a decoder and allocate the pools. `beside_bytes` of the process's memory belong to an encoder in the same
    process."""
    runner = DecoderRunner(info, config)
    runner.allocate(_divide_memory(runner, config, beside_bytes))
    return runner


def _divide_memory(runner: DecoderRunner, config: EngineConfig, beside_bytes: int) -> MemoryReport:
    """Size the pools; no KV cache is larger than all sequences at full length could use."""
    activation = None if all_pools_given(config) else measure_step(runner, config)
    beside_bytes += 0 if runner.adapters is None else runner.adapters.capacity_bytes
    weights, needs = runner.weight_bytes, _memory_needs(runner, config)
    report = size_decoder(config, needs, runner.device, weights, activation, beside_bytes)
    log.info("memory", **report.describe(), device=runner.device.type)
    return report


def _memory_needs(runner: DecoderRunner, config: EngineConfig) -> DecoderNeeds:
    info, spec, block_size = runner.info, runner.spec, runner.block_size
    input_rows = info.max_encoder_tokens if info.has_cross_attention else runner.max_model_len
    input_bytes = input_rows * spec.encoder_width * runner.dtype.itemsize if info.media_kind else 0
    cross = runner.max_cross_blocks
    shortest = cross if info.is_encoder_decoder and info.media_kind != "text" else min(cross, 1)
    full = -(-runner.max_model_len // block_size) + cross
    return DecoderNeeds(
        block=runner.block_bytes,
        request=(shortest + 1) * runner.block_bytes,
        all_requests=full * config.max_num_seqs * runner.block_bytes,
        input=input_bytes,
        all_inputs=input_bytes * config.max_num_seqs,
        decode_share=runner.backend.gathered_share / spec.num_caches,
    )


@torch.inference_mode()
def measure_step(runner: DecoderRunner, config: EngineConfig) -> int | None:
    """Return the peak bytes of the largest step, beside weights and pools; None if no measurement is possible.

    The runner has everything but its cache, and gets a small one meanwhile.
    """
    shape = (2, 2, runner.block_size, runner.spec.num_kv_heads, runner.spec.head_dim)
    runner.caches = [zeros(shape, runner.dtype, runner.device)] * runner.spec.num_caches
    profile = _StepProfile(runner, config)
    if runner.adapters is not None:
        runner.adapters.load([profile.adapter])
    parts = [profile.warm_up(), profile.prefill(), profile.logits()]
    del profile
    if runner.adapters is not None:
        runner.adapters.clear()
    parts.append(measure_graphs(runner))
    runner.caches = []
    release_free_memory(runner.device)
    return None if None in parts else sum(part for part in parts if part is not None)


def measure_graphs(runner: DecoderRunner) -> int:
    """Return the bytes kept by recorded steps, plans included.

    The largest is recorded, which has the memory that all share, and the one before it: the others add as much again.
    """
    if not runner.records_graphs:
        return 0
    release_free_memory(runner.device)
    parts, recorder = runner.graph_parts(), runner.make_recorder()
    graphs, held = [], [0]
    for size in reversed(runner.graph_sizes):
        with contextlib.suppress(UnrecordableError):
            graphs.append(StepGraphs.record(parts, [size], recorder))
            held.append(recorder.size_bytes)
        if len(graphs) == 2:
            break
    kept = [after - before for before, after in pairwise(held)]
    return sum(kept[:1]) + sum(kept[1:]) * (len(runner.graph_sizes) - 1)


class _StepProfile:
    def __init__(self, runner: DecoderRunner, config: EngineConfig) -> None:
        self._runner = runner
        self._on_cpu = runner.device.type == "cpu"
        self._max_tokens = config.max_num_batched_tokens
        self._max_rows = min(config.max_num_seqs, self._max_tokens)
        self._max_seqs = config.max_num_seqs
        self._deadline_s = time.monotonic() + TIME_S if self._on_cpu else float("inf")
        self.adapter = next(iter(runner.info.adapters), "")
        """With which all rows are computed: any has the largest products, those of full width."""

    def warm_up(self) -> int | None:
        """Run a first step, to set up library buffers and thread stacks."""
        return self._run(min(WARM_UP_TOKENS, self._max_tokens))

    def prefill(self) -> int | None:
        longest = min(self._max_tokens, self._max_seqs * (self._runner.max_model_len - 1))
        affordable = max(LEAST_ROWS, int(LAYER_FLOP / self._flop_per_token())) if self._on_cpu else longest
        return _measure_rows(self._run, longest, affordable)

    def logits(self) -> int | None:
        """Run the head and the sampler, with filters and other consumers of memory."""
        affordable = max(LEAST_SEQS, SAMPLED_VALUES // self._runner.spec.vocab_size) if self._on_cpu else self._max_rows
        return _measure_rows(self._sample, self._max_rows, affordable)

    def _sample(self, num_rows: int) -> int | None:
        runner, spec = self._runner, self._runner.spec
        sampler = Sampler(runner.info, spec.vocab_size)
        sequences = [Sequence(self._request(1), index, [0]) for index in range(num_rows)]
        with PeakMemory(runner.device) as peak:
            hidden = torch.zeros(num_rows, spec.hidden_size, dtype=runner.dtype, device=runner.device)
            sampler.sample(runner.logits(hidden), sequences)
        return peak.size_bytes

    def _flop_per_token(self) -> float:
        """FLOP of one layer per token, at full length."""
        spec = self._runner.spec
        weights = sum(parameter.numel() for parameter in self._runner.model.parameters()) / spec.num_layers
        return float(2 * weights + 4 * spec.num_heads * spec.head_dim * self._runner.max_model_len)

    def _run(self, num_tokens: int) -> int | None:
        """Return the peak of a step with the given number of prompt tokens: the last tokens of as few sequences as
        possible."""
        runner, length = self._runner, self._runner.max_model_len - 1
        counts = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
        requests = [self._request(length) for _ in counts]
        step = ScheduledStep([request.sequences[0] for request in requests], counts, requests)
        for sequence, count in zip(step.sequences, counts, strict=True):
            sequence.num_computed_tokens = length - count
        stand_ins = self._stand_ins(length)
        with PeakMemory(runner.device) as peak, one_layer_of_each_stack(runner.model, self._deadline_s):
            runner.buffers.acquire_slots(step.sequences)
            runner.run(step, *stand_ins)
        runner.buffers.release_slots(step.sequences)
        return peak.size_bytes

    def _stand_ins(self, length: int) -> tuple[BlockManager, EncoderCacheManager]:
        """Return a block manager whose tables are made of block 1, again and again, and a cache of zeros."""
        runner, num_rows = self._runner, self._encoder_tokens
        cross = [1] * -(-num_rows // runner.block_size)
        output = zeros((num_rows, runner.spec.encoder_width), runner.dtype, runner.device)
        blocks = SimpleNamespace(
            tables=defaultdict[int, list[int]](lambda: [1] * -(-length // runner.block_size)),
            get_cross_block_table=lambda _: cross,
            needs_writing=lambda _: bool(cross),
            mark_written=lambda _: None,
        )
        return cast(BlockManager, blocks), cast(EncoderCacheManager, SimpleNamespace(get=lambda _: output))

    @property
    def _encoder_tokens(self) -> int:
        info = self._runner.info
        return info.max_encoder_tokens if info.is_encoder_decoder else 0

    def _request(self, length: int) -> Request:
        """Make a prompt of the given length, with the longest input if every request has an input."""
        runner, num_rows = self._runner, self._encoder_tokens
        info = runner.info
        kind, shape = info.media_kind or "text", [num_rows, runner.spec.encoder_width]
        offer = Offer("profile", 0, 0, "profile", kind, shape, "", 0, InputLayout(num_rows, []), "", 0.0)
        item = RequestInput(InputSlot(0, kind, "profile", None), InputState.READY, offer)
        return Request(
            "profile",
            [0] * length,
            [item] if num_rows else [],
            sampling=msgspec.structs.replace(_FILTERS, adapter=self.adapter, prompt_logprobs=1),  # all rows are read
            arrival=0,
            is_encoder_decoder=info.is_encoder_decoder,
            cross_attention=info.has_cross_attention,
            uses_mrope=runner.spec.mrope_section is not None,
        )


def _measure_rows(measure: Callable[[int], int | None], num_rows: int, affordable: int) -> int | None:
    """Return the bytes for the given rows; where time allows fewer only, by the line through two smaller numbers."""
    if affordable >= num_rows:
        return measure(num_rows)
    low, *highs = map(measure, (affordable // 4, affordable, affordable))
    known = [size for size in highs if size is not None]  # the least: what others take meanwhile would be scaled, too
    if low is None or not known:
        return None
    return extrapolate([(affordable // 4, low), (affordable, min(known))], num_rows)
