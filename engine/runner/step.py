"""What the host works out for a step besides its input arrays: positions, attention metadata, and whose logits are
wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.cache.block_manager import BlockManager
from engine.scheduler.decoder import ScheduledStep
from engine.state.inputs import IntArray, StepInputs


@dataclass(frozen=True)
class WantedRows:
    """Which hidden states of a step have a use.

    finished     numbers of the sequences whose last known token is computed: the next one can be sampled
    last_rows    int64 [len(finished)]: the rows of these tokens
    prompts      (number of a sequence, start, end): rows of prompt tokens whose log-probabilities are asked for
    """

    finished: list[int]
    last_rows: IntArray
    prompts: list[tuple[int, int, int]]


def wanted_rows(step: ScheduledStep, inputs: StepInputs) -> WantedRows:
    """Logits are of no use in the middle of a prompt, nor to whoever prefills for somebody else."""
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
    """[num_tokens], or [3, num_tokens] with M-RoPE: the prompt's own grid, then one step per generated token."""
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
    """Of self-attention. `block_table` and `slot_mapping` are those of `inputs`, wherever they are wanted."""
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
