"""Host-side preparation of a step beside its input arrays: positions, attention metadata and wanted logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.cache.block_manager import BlockManager
from engine.state.inputs import ScheduledStep, StepInputs
from engine.state.spec import IntArray


@dataclass(frozen=True)
class WantedRows:
    """Rows of a step's hidden states with a use.

    finished     numbers of the sequences whose last known token is computed: the next one can be sampled
    last_rows    int64 [len(finished)]: the rows of these tokens
    prompts      (number of a sequence, start, end): rows of prompt tokens whose log-probabilities are asked for
    """

    finished: list[int]
    last_rows: IntArray
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
        wanted = request.sampling.prompt_logprobs is not None and not request.prompt_logprobs_told
        if wanted and sequence.num_computed_tokens < len(request.prompt):
            prompts.append((index, starts[index], starts[index + 1]))
    return WantedRows(finished, inputs.query_start_loc[1:][finished] - 1, prompts)


def positions_of(step: ScheduledStep, inputs: StepInputs, *, uses_mrope: bool) -> IntArray:
    """Return positions [num_tokens], or [3, num_tokens] with M-RoPE: the prompt's own grid, then a step per generated
    token."""
    if not uses_mrope:
        return inputs.positions
    requests = [sequence.request for sequence in step.sequences]
    deltas = [request.mrope_next - len(request.prompt) for request in requests]
    positions: IntArray = np.tile(inputs.positions + np.repeat(deltas, step.num_tokens), (3, 1))
    for index, (sequence, request) in enumerate(zip(step.sequences, requests, strict=True)):
        first = sequence.num_computed_tokens
        known = request.prompt_positions()[:, first : first + step.num_tokens[index]]
        start = int(inputs.query_start_loc[index])
        positions[:, start : start + known.shape[1]] = known
    return positions


def self_metadata(
    step: ScheduledStep, inputs: StepInputs, blocks: BlockManager, block_table: Tensor, slot_mapping: Tensor | None
) -> AttentionMetadata:
    """Return the metadata of self-attention. `block_table` and `slot_mapping` belong to `inputs`, on the wanted
    device."""
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc.tolist(),
        seq_lens=inputs.seq_lens.tolist(),
        block_table=block_table,
        block_lists=[blocks.get_block_table(sequence.sequence_id) for sequence in step.sequences],
        slot_mapping=slot_mapping,
        causal=True,
        num_decodes=step.num_decodes,
        host_table=inputs.block_table,
    )
