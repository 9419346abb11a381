"""Preparation of a step beside its input arrays: positions, attention metadata, wanted logits, and encoder rows.

Encoder rows take the place of placeholder tokens' embeddings:

    prompt          t t p p p p t t       p: placeholder tokens of one input
    step's tokens       └─────┘           a chunk: rows 1 .. 3 of the encoder output, at rows of the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.model_info import ModelInfo
from engine.attention.metadata import AttentionMetadata
from engine.cache.encoder_cache import EncoderCacheManager
from engine.device.h2d import send, send_tensor
from engine.state.inputs import EncoderRows, ScheduledStep, StepInputs
from engine.state.spec import IntArray


@dataclass(frozen=True)
class WantedRows:
    """Rows of a step's hidden states with a use.

    finished     numbers of the sequences whose last known token is computed: the next one can be sampled
    last_rows    the rows of these tokens
    prompts      (number of a sequence, start, end): rows of prompt tokens whose log-probabilities are asked for
    """

    finished: list[int]
    last_rows: list[int]
    prompts: list[tuple[int, int, int]]


def wanted_rows(step: ScheduledStep, inputs: StepInputs) -> WantedRows:
    """Select the rows with wanted logits: none in the middle of a prompt, none for a prefill-only request."""
    finished, prompts = [], []
    starts, seq_lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
    for index, sequence in enumerate(step.sequences):
        request = sequence.request
        whole = request.is_prompt_known and seq_lens[index] == len(sequence.token_ids)
        if whole and not request.prefill_only:
            finished.append(index)
        wanted = request.sampling.prompt_logprobs is not None and not request.prompt_logprobs_sent
        if wanted and sequence.num_computed_tokens < len(request.prompt):
            prompts.append((index, starts[index], starts[index + 1]))
    return WantedRows(finished, [starts[index + 1] - 1 for index in finished], prompts)


def positions_of(step: ScheduledStep, inputs: StepInputs, *, uses_mrope: bool) -> IntArray:
    """Return positions [num_tokens], or [3, num_tokens] with M-RoPE: the prompt's own grid, then a step per generated
    token."""
    if not uses_mrope:
        return inputs.positions
    axes, starts = inputs.axes, inputs.query_start_loc.tolist()
    for sequence, start, count in zip(step.sequences, starts, step.num_tokens, strict=False):
        axes[0, start : start + count] = sequence.request.mrope_end - len(sequence.request.prompt)
    np.add(axes[0], inputs.positions, out=axes[0])
    axes[1:] = axes[0]
    for sequence, start, count in zip(step.sequences, starts, step.num_tokens, strict=False):
        first, grid = sequence.num_computed_tokens, sequence.request.mrope_positions
        if first < grid.shape[1]:
            known = grid[:, first : first + count]
            axes[:, start : start + known.shape[1]] = known
    return axes


def self_metadata(
    step: ScheduledStep,
    inputs: StepInputs,
    block_table: Tensor,
    slot_mapping: Tensor | None,
    *,
    whole_inputs: bool = False,
) -> AttentionMetadata:
    """Return the metadata of self-attention. `block_table` and `slot_mapping` belong to `inputs`, on the wanted
    device. With `whole_inputs` the tokens of an input see each other in both directions."""
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc.tolist(),
        seq_lens=inputs.seq_lens.tolist(),
        block_table=block_table,
        slot_mapping=slot_mapping,
        causal=True,
        num_decodes=step.num_decodes,
        host_table=inputs.block_table,
        key_ranges=_ranges_of_whole_inputs(step, inputs) if whole_inputs else None,
        requests=[sequence.request for sequence in step.sequences],
    )


def _ranges_of_whole_inputs(step: ScheduledStep, inputs: StepInputs) -> IntArray | None:
    """Return the keys of each token, [num_tokens, 2]: up to itself, or to the end of the input that it stands for.

    None where no token stands for an input.
    """
    ranges, starts = inputs.key_ranges, inputs.query_start_loc.tolist()
    ranges[:, 0], ends = 0, ranges[:, 1]
    np.add(inputs.positions, 1, out=ends)
    is_causal = True
    for index, sequence in enumerate(step.sequences):
        first, last = sequence.num_computed_tokens, sequence.num_computed_tokens + step.num_tokens[index]
        for item in sequence.request.inputs if last > first + 1 else ():
            if item.start is not None and item.end is not None and item.start < last and item.end > first:
                begin, end = max(item.start, first), min(item.end, last)
                ends[starts[index] + begin - first : starts[index] + end - first] = end
                is_causal = False
    return None if is_causal else ranges


@dataclass(frozen=True)
class MergedRows:
    """Encoder rows `outputs` [k, encoder_width] for rows `rows` [k] of the batch."""

    rows: IntArray
    outputs: Tensor


def find_pieces(
    step: ScheduledStep, inputs: StepInputs, cache: EncoderCacheManager, info: ModelInfo
) -> list[MergedRows]:
    """Return the encoder rows of a step: for each input, the rows with a placeholder in the step."""
    pieces = []
    for index, sequence in enumerate(step.sequences):
        first = sequence.num_computed_tokens
        last = first + step.num_tokens[index]
        offset = int(inputs.query_start_loc[index]) - first
        for item in sequence.request.inputs:
            if item.start is None or item.end is None or item.start >= last or item.end <= first:
                continue
            assert item.offer is not None
            placeholder = info.row_token_of(item.slot.kind)
            is_placeholder = [
                np.full(count, token_id == placeholder) for token_id, count in item.offer.layout.expansion
            ]
            places = np.flatnonzero(np.concatenate(is_placeholder)) + item.start
            begin, end = np.searchsorted(places, (first, last))
            if begin < end:
                outputs = cache.get(item.offer.content_hash)[begin:end]
                pieces.append(MergedRows(places[begin:end] + offset, outputs))
    return pieces


def merge_embeddings(embeddings: Tensor, pieces: Sequence[MergedRows], dtype: torch.dtype) -> EncoderRows | None:
    """Put the first columns of each piece into `embeddings` [num_tokens, hidden_size].

    Returns the whole rows where they have more columns than that (Qwen3-VL), None otherwise.
    """
    if not pieces:
        return None
    device, hidden_size = embeddings.device, embeddings.shape[1]
    [rows] = send(device, np.concatenate([piece.rows for piece in pieces]))
    outputs = torch.cat([send_tensor(piece.outputs, device, dtype) for piece in pieces])
    embeddings[rows] = outputs[:, :hidden_size]
    return EncoderRows(rows, outputs) if outputs.shape[1] > hidden_size else None
