"""Steps recorded at start for some numbers of tokens, and replayed with new inputs: as CUDA graphs, on a CPU as calls.

Launching the kernels of a decode step one by one takes the host longer than a GPU takes to run them, and a quarter of
the step of a small model on a CPU. A recording only ever does the same work over the same addresses. So a batch is
padded up to the next size, and what changes from step to step stands in buffers at fixed addresses:

    rows        int64 [3 + axes, size]     input ids · slots of LastTokens · slot mapping · positions (M-RoPE: 3 axes)
                one more for Mllama        whether an input stands at a token or before it
    embeddings  [size, hidden_size]        where the plan takes prompts: encoder outputs take the place of some
    self plan, cross plan                  the backend's (FixedPlan)

    batch of 3, size 4     a  b  c  pad    padding: token 0 at position 0, one key in block 0, which is nobody's; of an
                                           input it reads nothing

Plans say which steps they serve. FlashInfer has some for decodes, with a token per request, and others for steps with
parts of prompts, in sizes above the largest batch of decodes. The native backend of CPUs has one for both.

Where inputs stand in the prompt (Mllama), requests without any share a batch with others, or have one to themselves.
They read nothing. Their row says that no input is before them, and layers of cross-attention leave them as they are.

Recorded is what lies between the input ids, or embeddings, and the hidden states. Logits and sampling are outside:
their shapes vary with what requests ask for, and they are few kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from common.telemetry import get_logger
from engine.attention.backend import AttentionBackend, FixedPlan, PagedAttentionContext, PlanSizes
from engine.attention.metadata import AttentionMetadata
from engine.device.recorder import Recorder
from engine.models.base import DecoderModel
from engine.native import ops
from engine.runner.last_tokens import LastTokens
from engine.runner.step import MergedRows, merge_embeddings
from engine.state.inputs import Staging, StepInputs, tile_of
from engine.state.spec import HeadSpec, IntArray

log = get_logger()

_SMALL_SIZES: Final = (1, 2, 4)
_SIZE_STEP: Final = 8
_PROMPT_SIZES: Final = (96, 128, 192, 256, 384, 512, 768, 1024)
_MAX_CPU_SIZE: Final = 192
"""Steps of more than the last of them, or than this on a CPU, gain little."""
_POSITIONS: Final = 3
"""Rows before those of the positions."""


@dataclass(frozen=True)
class GraphParts:
    """The parts of a recorded step.

    A sequence has up to `max_blocks` blocks, the inputs of a request, where cross-attention reads them, up to
    `max_cross_blocks`. With `inputs_in_prompt`, which of these a token reads depends on where it stands (Mllama).
    """

    model: DecoderModel
    backend: AttentionBackend
    caches: list[Tensor]
    last_tokens: LastTokens
    max_blocks: int
    max_cross_blocks: int
    inputs_in_prompt: bool


def graph_sizes(device: torch.device, max_num_seqs: int, max_tokens: int) -> list[int]:
    """Return the numbers of tokens to record: 1, 2, 4, 8, 16, 24 … and the largest possible batch, and above it some
    for steps with prompts. On a CPU, where padding is work, all of whole tiles."""
    if device.type == "cpu":
        return [size for size in range(1, min(max_tokens, _MAX_CPU_SIZE) + 1) if size % tile_of(size) == 0]
    max_num_seqs = min(max_num_seqs, max_tokens)
    steps = range(_SIZE_STEP, max_num_seqs, _SIZE_STEP)
    decodes = [*(size for size in (*_SMALL_SIZES, *steps) if size < max_num_seqs), max_num_seqs]
    return decodes + [size for size in _PROMPT_SIZES if max_num_seqs < size <= max_tokens]


class UnrecordableError(Exception):
    """Steps of this model, with this attention backend, are never the same work; the message says why."""


class StepGraphs:
    """Recorded steps, by number of tokens. `num_replays` counts replayed steps."""

    def __init__(self, recordings: Sequence[_Recording]) -> None:
        self._recordings = sorted(recordings, key=lambda recording: recording.size)
        self.num_replays = 0

    @classmethod
    @torch.inference_mode()
    def record(cls, parts: GraphParts, sizes: Sequence[int], recorder: Recorder) -> StepGraphs:
        """Record a step of each size, the largest first: smaller recordings fit into the same memory.

        Sizes that the attention backend has no plan for are left out. Raises UnrecordableError where none is left, and
        where one is refused.
        """
        recordings = [one for size in sorted(sizes, reverse=True) if (one := _record(parts, size, recorder))]
        if not recordings:
            name = parts.backend.name
            raise UnrecordableError(f"attention backend {name!r} has no plans at fixed addresses for this model")
        return cls(recordings)

    @property
    def sizes(self) -> list[int]:
        return [recording.size for recording in self._recordings]

    def run(
        self,
        inputs: StepInputs,
        positions: IntArray,
        own: AttentionMetadata,
        cross: AttentionMetadata | None,
        pieces: Sequence[MergedRows] = (),
    ) -> Tensor | None:
        """Return hidden states [n, hidden_size] of a step of n tokens, valid until the next call; None if no recording
        fits. A model that selects rows leaves those of `inputs.read`.

        positions int64 [n], or [3, n] with M-RoPE. `own` and `cross` need no tensors on the device; `cross` is None
        where nobody reads an input. `pieces` are as wide as embeddings.
        """
        count = len(inputs.input_ids)
        any_plan = count == own.num_requests and not pieces
        fitting = (one for one in self._recordings if one.size >= count and (any_plan or one.takes_prompts))
        recording = next(fitting, None)
        if recording is None or not recording.prepare(own, cross):
            return None
        self.num_replays += 1
        return recording.run(inputs, positions, cross, pieces)


class _Recording:
    """Inputs, plans and recorded work of one number of tokens."""

    def __init__(
        self, parts: GraphParts, size: int, self_plan: FixedPlan, cross_plan: FixedPlan | None, recorder: Recorder
    ) -> None:
        self.size, self.takes_prompts = size, self_plan.takes_prompts
        self._parts, self._self_plan, self._cross_plan = parts, self_plan, cross_plan
        self._has_axes = parts.model.spec.mrope_section is not None
        self._tells_inputs = cross_plan is not None and parts.inputs_in_prompt
        self._end = _POSITIONS + (3 if self._has_axes else 1)
        num_rows = self._end + self._tells_inputs
        self._staging = Staging(parts.caches[0].device, num_rows * size)
        self._shape = num_rows, size
        [self._rows] = self._staging.send(self._staging.take(*self._shape))
        hidden_size = parts.model.spec.hidden_size
        self._embeddings = parts.caches[0].new_zeros(size, hidden_size) if self.takes_prompts else None
        self._read, self._num_read, self._selects = torch.arange(size), torch.tensor([size]), False
        nothing = _no_requests(causal=False) if cross_plan is not None else None
        if not self.prepare(_no_requests(causal=True), nothing):
            raise ValueError(f"attention backend {parts.backend.name!r} has a plan that does not serve its own padding")
        self._replay = recorder.record(self._work)

    def prepare(self, own: AttentionMetadata, cross: AttentionMetadata | None) -> bool:
        """Adapt the plans to a step of up to `size` tokens; return False if the plans do not serve the step."""
        if cross is None and self._tells_inputs:
            cross = _no_requests(causal=False)
        if (cross is None) != (self._cross_plan is None):
            return False
        plans = ((self._cross_plan, cross), (self._self_plan, own))
        fit = partial(padded, size=self.size, num_requests=self._self_plan.sizes.max_requests)
        return all(plan.update(fit(batch)) for plan, batch in plans if plan is not None and batch is not None)

    def run(
        self, inputs: StepInputs, positions: IntArray, cross: AttentionMetadata | None, pieces: Sequence[MergedRows]
    ) -> Tensor:
        """Return the rows of the step, or those that the model has selected. Call `prepare` for the same step first."""
        self._staging.begin()
        rows, count = self._staging.take(*self._shape), len(inputs.input_ids)
        rows[:] = 0
        rows[0, :count] = inputs.input_ids
        rows[1, :count] = inputs.request_indices
        rows[2, :count] = inputs.slot_mapping
        rows[_POSITIONS : self._end, :count] = positions
        if cross is not None and cross.after_input is not None:
            rows[self._end, :count] = cross.after_input
        self._staging.send(rows)
        if self._embeddings is not None:
            merge_embeddings(self._embeddings.copy_(self._embed()), pieces, self._embeddings.dtype)
        if self._selects:
            self._num_read[0] = count = len(inputs.read)
            self._read.numpy()[:count] = inputs.read
        return self._replay()[:count]

    def _select(self, x: Tensor) -> Tensor:
        self._selects = True
        return ops.take_rows(x, self._read, self._num_read)

    def _embed(self) -> Tensor:
        input_ids, slots = self._rows[:2]
        return self._parts.model.embed(self._parts.last_tokens.fill(input_ids, slots))

    def _work(self) -> Tensor:
        parts = self._parts
        slot_mapping = self._rows[2]
        positions = self._rows[_POSITIONS : self._end] if self._has_axes else self._rows[_POSITIONS]
        context = PagedAttentionContext(
            parts.backend,
            parts.caches,
            slot_mapping.to(parts.backend.slot_dtype),
            self._self_plan,
            self._cross_plan,
            self._rows[self._end].bool() if self._tells_inputs else None,
            select=self._select if parts.backend.calls_kernels else None,
        )
        embeddings = self._embed() if self._embeddings is None else self._embeddings
        hidden: Tensor = parts.model(embeddings, positions, context)
        return hidden


def _record(parts: GraphParts, size: int, recorder: Recorder) -> _Recording | None:
    """None without a plan, and where prompts are refused. Raises UnrecordableError where decodes are refused."""
    try:
        plans = _make_plans(parts, size)
        return None if plans is None else _Recording(parts, size, *plans, recorder)
    except Exception as error:  # FlashInfer and CUDA say no by RuntimeError, ValueError, AssertionError and others
        device = parts.caches[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises again where the device is lost
        reason = f"a step of {size} was refused: {type(error).__name__}: {error}"[:300]
        if max_requests(parts, size) is None:
            raise UnrecordableError(reason) from error
        log.warning("steps with prompts run eagerly", reason=reason)
        return None


def _make_plans(parts: GraphParts, size: int) -> tuple[FixedPlan, FixedPlan | None] | None:
    spec, cache = parts.model.spec, parts.caches[0]
    heads = HeadSpec.of(spec)

    def make(max_blocks: int, *, causal: bool) -> FixedPlan | None:
        own, most = replace(heads, biased=("self" if causal else "cross") in spec.biased), max_requests(parts, size)
        return parts.backend.make_fixed_plan(
            PlanSizes(size, max_blocks, cache.shape[2], cache.dtype, own, causal, most)
        )

    own = make(parts.max_blocks, causal=True)
    cross = make(parts.max_cross_blocks, causal=False) if spec.has_cross_attention else None
    return None if own is None or (cross is None and spec.has_cross_attention) else (own, cross)


def max_requests(parts: GraphParts, size: int) -> int | None:
    """Return how many requests a plan for prompts has, one for padding among them; None for decodes, and where one plan
    serves both."""
    most = len(parts.last_tokens.tokens)
    return None if parts.backend.calls_kernels or size <= most else most + 1


def padded(metadata: AttentionMetadata, size: int, num_requests: int | None = None) -> AttentionMetadata:
    """Pad a step to `size` tokens, a request each, with one key in block 0, or none, as in cross-attention.

    To `num_requests`: the first one behind those of the step has all padding, the others have no tokens.
    """
    there, table, num_tokens = metadata.num_requests, metadata.table, metadata.query_start_loc[-1]
    more = size - num_tokens
    rest = more if num_requests is None else num_requests - there
    if not rest:
        return metadata
    num_keys = int(metadata.causal)
    starts = [*range(num_tokens + 1, size + 1)] if num_requests is None else [size] * rest
    lens = [num_keys * max(1, starts[0] - num_tokens), *[num_keys] * (rest - 1)]
    whole = np.zeros((there + rest, max(1, table.shape[1])), np.int64)
    whole[:there, : table.shape[1]] = table
    ranges, after, first = metadata.key_ranges, metadata.after_input, metadata.num_computed_tokens
    return replace(
        metadata,
        query_start_loc=[*metadata.query_start_loc, *starts],
        seq_lens=metadata.seq_lens + lens,
        block_table=torch.from_numpy(whole),
        slot_mapping=None,
        num_decodes=metadata.num_decodes + rest,
        key_ranges=None if ranges is None else np.pad(ranges, ((0, more), (0, 0))),
        after_input=None if after is None else np.pad(after, (0, more)),
        host_table=whole,
        num_computed_tokens=None if first is None else first + [0] * rest,
        requests=(),
    )


def _no_requests(*, causal: bool) -> AttentionMetadata:
    table = np.zeros((0, 1), np.int64)
    return AttentionMetadata([0], [], torch.from_numpy(table), None, causal, 0, host_table=table)
