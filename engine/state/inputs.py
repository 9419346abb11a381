"""Inputs of a forward pass, prepared without a loop over tokens (the document "Prepare inputs for model forwarding").

Two tables hold what is known of every running request, a row (slot) each:

    token_ids    [max_num_seqs, max_model_len]        the tokens
    block_table  [max_num_seqs, max_blocks_per_seq]   logical block -> physical block; 0 marks unused

From them, per step, with M = max_model_len and K = max_blocks_per_seq:

    request_indices       slot of each token                      repeat(slots, num_scheduled)
    positions             num_computed + place within this step
    token_indices         positions + request_indices * M         -> input_ids
    block_table_indices   request_indices * K + positions // block_size
    slot_mapping          block number * block_size + positions % block_size
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from engine.state.request import Request, Sequence
from engine.state.spec import IntArray

_LAST = itemgetter(-1)


@dataclass(frozen=True)
class ScheduledStep:
    """The batch of one step: `num_tokens[i]` tokens of `sequences[i]`, sequences with a single token first.

    `admitted` are the requests that begin (again) in this step.
    """

    sequences: list[Sequence]
    num_tokens: list[int]
    admitted: list[Request]

    @property
    def num_decodes(self) -> int:
        return sum(1 for count in self.num_tokens if count == 1)


@dataclass(frozen=True)
class StepInputs:
    """Arrays of a step; token-level arrays have an entry per scheduled token, in request order."""

    request_indices: IntArray
    positions: IntArray
    token_indices: IntArray
    input_ids: IntArray
    block_table_indices: IntArray
    slot_mapping: IntArray
    query_start_loc: IntArray
    seq_lens: IntArray
    num_computed_tokens: IntArray
    block_table: IntArray


class InputBuffers:
    """The two tables and the arithmetic over them. A running request holds a slot, a row of each table."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self.block_table = np.zeros((max_num_seqs, self.max_blocks_per_seq), np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._arange = np.arange(max(max_num_seqs, max_model_len) + 1)

    def acquire_slots(self, sequences: ListOf[Sequence]) -> None:
        """Give a slot to each sequence without one."""
        for sequence in sequences:
            if sequence.slot_index < 0:
                sequence.slot_index = slot = self.free_slots.pop()
                self._num_tokens[slot] = self._num_blocks[slot] = self.num_computed_tokens[slot] = 0

    def release_slots(self, sequences: ListOf[Sequence]) -> None:
        """Free the slots of sequences; those without one are fine."""
        for sequence in sequences:
            if sequence.slot_index >= 0:
                self.block_table[sequence.slot_index] = 0
                self.free_slots.append(sequence.slot_index)
                sequence.slot_index = -1

    def update(self, slot: int, token_ids: ListOf[int], blocks: ListOf[int], num_computed_tokens: int) -> None:
        """Update a row by copying only values new since the last call."""
        known = int(self._num_tokens[slot])
        # The block that is written next may have become another one: a shared block is copied on write.
        known_blocks = min(int(self._num_blocks[slot]), num_computed_tokens // self.block_size)
        if len(token_ids) > known:
            self.token_ids[slot, known : len(token_ids)] = token_ids[known:]
            self._num_tokens[slot] = len(token_ids)
        if len(blocks) > known_blocks:
            self.block_table[slot, known_blocks : len(blocks)] = blocks[known_blocks:]
            self._num_blocks[slot] = len(blocks)
        self.num_computed_tokens[slot] = num_computed_tokens

    def update_all(
        self,
        slots: ListOf[int],
        token_ids: ListOf[ListOf[int]],
        blocks: ListOf[ListOf[int]],
        num_computed_tokens: ListOf[int],
    ) -> None:
        """Update all rows of a step. Rows with a single new token, usual for decodes, are written together.

        An unknown token (below 0) stays below 0 in the table after it has become known. It is read in the step right
        behind, and again only after `acquire_slots`, which writes the whole row anew.
        """
        count = len(slots)
        rows, lengths = np.array(slots, np.int64), np.fromiter(map(len, token_ids), np.int64, count)
        known = self._num_tokens[rows]
        computed = np.array(num_computed_tokens, np.int64)
        num_blocks, known_blocks = np.fromiter(map(len, blocks), np.int64, count), self._num_blocks[rows]
        # The block that is written next may have become another one: a shared block is copied on write.
        replaced = self.block_table[rows, known_blocks - 1] != np.fromiter(map(_LAST, blocks), np.int64, count)
        replaced |= computed // self.block_size < known_blocks - 1
        behind = (lengths > known + 1) | (num_blocks > known_blocks) | replaced
        for index in np.flatnonzero(behind).tolist():
            self.update(slots[index], token_ids[index], blocks[index], num_computed_tokens[index])
        last = np.fromiter(map(_LAST, token_ids), np.int64, count)
        self.token_ids[rows, lengths - 1] = last
        self._num_tokens[rows] = np.maximum(lengths, known)
        self.num_computed_tokens[rows] = computed

    def prepare(self, slots: ListOf[int], num_scheduled_tokens: ListOf[int]) -> StepInputs:
        """Arrays for the next num_scheduled_tokens[i] tokens of the request in slots[i]."""
        rows, counts = np.asarray(slots), np.asarray(num_scheduled_tokens)
        computed = self.num_computed_tokens[rows]
        if counts.max(initial=1) == 1:  # decodes only: one token each
            query_start_loc = self._arange[: len(rows) + 1]
            request_indices, positions = rows, computed
        else:
            query_start_loc = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(counts, out=query_start_loc[1:])
            num_tokens = int(query_start_loc[-1])
            if num_tokens > len(self._arange):
                self._arange = np.arange(num_tokens * 2)
            request_indices = np.repeat(rows, counts)
            positions = self._arange[:num_tokens] + np.repeat(computed - query_start_loc[:-1], counts)
        token_indices = positions + request_indices * self.max_model_len
        block_table_indices = request_indices * self.max_blocks_per_seq + positions // self.block_size
        block_numbers = self.block_table.ravel()[block_table_indices]
        seq_lens = computed + counts
        max_blocks = int(-(-seq_lens.max(initial=0) // self.block_size))
        return StepInputs(
            request_indices=request_indices,
            positions=positions,
            token_indices=token_indices,
            input_ids=self.token_ids.ravel()[token_indices],
            block_table_indices=block_table_indices,
            slot_mapping=block_numbers * self.block_size + positions % self.block_size,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            num_computed_tokens=computed,
            block_table=self.block_table[rows, :max_blocks],
        )
