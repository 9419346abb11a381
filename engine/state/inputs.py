"""Inputs of a forward pass, prepared without a loop over tokens (the document "Prepare inputs for model forwarding").

Two tables hold what is known of every running request, a row (slot) each:

    token_ids    [max_num_seqs, max_model_len]        the tokens
    block_table  [max_num_seqs, max_blocks_per_seq]   logical block -> physical block; 0 marks unused

From them, per step, with M = max_model_len and K = max_blocks_per_seq:

    request_indices       slot of each token                      repeat(slots, num_scheduled)
    positions             num_computed + place within this step
    token_indices         positions + request_indices * M         -> input_ids
    block_table_indices   request_indices * K + positions // block_size  -> block_numbers
    block_offsets         positions % block_size
    slot_mapping          block_numbers * block_size + block_offsets

All arrays of StepInputs live in memory made at start: a step writes into it, and allocates none of them. So does the
block table of cross-attention (`engine.runner.cross`). What attention backends derive from them (pages, the requests of
tokens, masks) is theirs: made per step, for recorded steps as the contents of buffers made at start. Numbers are int64:
PyTorch indexes by these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.state.request import Request, Sequence
from engine.state.spec import IntArray

CPU: Final = torch.device("cpu")
_LAST = itemgetter(-1)


class Staging:
    """Room for int64 arrays of a step, made at start: taken piece by piece on the host, sent in one transfer.

    On CUDA two pinned buffers are used in turn: while one is copied the next step is written into the other. On a CPU
    tensors share the memory of the arrays.
    """

    def __init__(self, device: torch.device, num_values: int) -> None:
        self.num_values = num_values
        on_cuda = device.type == "cuda"
        hosts = [torch.zeros(num_values, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2 if on_cuda else 1)]
        self._hosts: list[tuple[Tensor, IntArray]] = [(host, host.numpy()) for host in hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * len(hosts)
        self._target = torch.zeros(num_values, dtype=torch.int64, device=device) if on_cuda else hosts[0]
        self._used = 0

    def begin(self) -> None:
        """Give up the arrays of the step before the last; waits for their copy, done long ago."""
        self._hosts.append(self._hosts.pop(0))
        self._copied.append(self._copied.pop(0))
        self._used = 0
        if self._copied[0] is not None:
            self._copied[0].synchronize()

    def take(self, *shape: int) -> IntArray:
        """Return an array of the step, of any values."""
        first, self._used = self._used, self._used + math.prod(shape)
        return self._hosts[0][1][first : self._used].reshape(shape)

    def send(self, *arrays: IntArray) -> list[Tensor]:
        """Return arrays taken in this step as tensors on the device, at the places of earlier steps."""
        host, flat = self._hosts[0]
        starts = [(array.ctypes.data - flat.ctypes.data) // flat.itemsize for array in arrays]
        if host is not self._target:
            sent = slice(min(starts), max(start + array.size for start, array in zip(starts, arrays, strict=True)))
            self._target[sent].copy_(host[sent], non_blocking=True)
            self._copied[0] = torch.cuda.current_stream(self._target.device).record_event()
        places = zip(starts, arrays, strict=True)
        return [self._target[start : start + array.size].view(array.shape) for start, array in places]


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


def tile_of(num_tokens: int) -> int:
    """Return what the tokens of a step should be a multiple of, near `num_tokens`: an eighth to a quarter, at most 16.

    Matrix products compute in tiles, and recorded steps of a CPU come in these sizes: what does not fill the last tile
    is padded (tile quantization, Sarathi-Serve, Agrawal et al., 2024).
    """
    return min(16, 1 << max(num_tokens.bit_length() - 3, 0))


@dataclass(frozen=True)
class StepInputs:
    """Arrays of a step; token-level arrays have an entry per scheduled token, in request order.

    All are views of memory made at start, valid until the next step is prepared. `axes` [3, num_tokens] is room for the
    positions of M-RoPE, `key_ranges` [num_tokens, 2] and `after_input` [num_tokens] for those of `AttentionMetadata`;
    `num_tokens` are those of each request, in all `len(input_ids)`. `read` are the rows whose hidden states have a use,
    in order and at least one: all, until the runner knows better.
    """

    request_indices: IntArray
    positions: IntArray
    token_indices: IntArray
    input_ids: IntArray
    block_table_indices: IntArray
    block_numbers: IntArray
    block_offsets: IntArray
    slot_mapping: IntArray
    query_start_loc: IntArray
    seq_lens: IntArray
    num_computed_tokens: IntArray
    num_tokens: IntArray
    block_table: IntArray
    axes: IntArray
    key_ranges: IntArray
    after_input: npt.NDArray[np.bool_]
    read: IntArray

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def max_query_len(self) -> int:
        return int(self.num_tokens.max(initial=0))

    @property
    def attention_mask(self) -> npt.NDArray[np.bool_] | None:
        """Make the causal mask of self-attention, True for hidden keys; None for decodes, which see all their keys.

        Where every request begins, one mask [max_query_len, max_query_len] serves all; else it is a row for each token,
        [num_tokens, longest sequence]. Backends derive the same from positions, and store none.
        """
        if self.max_query_len <= 1:
            return None
        if not self.num_computed_tokens.any():
            positions = np.arange(self.max_query_len)
            return positions > positions[:, None]
        return np.arange(self.seq_lens.max()) > self.positions[:, None]


@dataclass(frozen=True)
class EncoderRows:
    """The encoder outputs of a step: `outputs` [k, encoder_width] belong to rows `rows` [k] of the batch."""

    rows: Tensor
    outputs: Tensor


class InputBuffers:
    """The two tables and the arithmetic over them. A running request holds a slot, a row of each table.

    A step has up to `max_tokens` tokens. `staging` holds what of its arrays is sent to `device`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_tokens: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self.block_table = np.zeros((max_num_seqs, self.max_blocks_per_seq), np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        # Of a step: for each sequence, and for each token.
        self._by_sequence = np.zeros((9, max_num_seqs), np.int64)
        self._is_behind = np.zeros((2, max_num_seqs), np.bool_)
        self._by_token = np.zeros((4, max_tokens), np.int64)
        self._key_ranges = np.zeros((max_tokens, 2), np.int64)
        self._after_input = np.zeros(max_tokens, np.bool_)
        self._arange = np.arange(max_tokens)
        num_sent = 8 * max_num_seqs + 1 + 7 * max_tokens + self.block_table.size
        self.staging = Staging(device, num_sent)

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
        count, (behind, other) = len(slots), self._is_behind[:, : len(slots)]
        rows, lengths, known, computed, num_blocks, known_blocks, last, place, found = self._by_sequence[:, :count]
        rows[:], computed[:] = slots, num_computed_tokens
        lengths[:], num_blocks[:], last[:] = [*map(len, token_ids)], [*map(len, blocks)], [*map(_LAST, blocks)]
        _take(self._num_tokens, rows, known)
        _take(self._num_blocks, rows, known_blocks)
        # The block that is written next may have become another one: a shared block is copied on write.
        np.multiply(rows, self.max_blocks_per_seq, out=place)
        place += known_blocks
        place -= 1
        np.not_equal(_take(self.block_table, place, found), last, out=behind)
        np.floor_divide(computed, self.block_size, out=place)
        place += 1
        behind |= np.less(place, known_blocks, out=other)
        behind |= np.greater(num_blocks, known_blocks, out=other)
        behind |= np.greater(lengths, np.add(known, 1, out=place), out=other)
        for index, is_behind in enumerate(behind.tolist()):
            if is_behind:
                self.update(slots[index], token_ids[index], blocks[index], num_computed_tokens[index])
        last[:] = [*map(_LAST, token_ids)]
        np.multiply(rows, self.max_model_len, out=place)
        place += lengths
        place -= 1
        self.token_ids.reshape(-1)[place] = last
        self._num_tokens[rows] = np.maximum(lengths, known, out=known)
        self.num_computed_tokens[rows] = computed

    def prepare(self, slots: ListOf[int], num_scheduled_tokens: ListOf[int]) -> StepInputs:
        """Arrays for the next num_scheduled_tokens[i] tokens of the request in slots[i]."""
        memory, count, total = self.staging, len(slots), sum(num_scheduled_tokens)
        memory.begin()
        rows, counts, computed, seq_lens, shift = memory.take(5, count)
        query_start_loc = memory.take(count + 1)
        input_ids, positions, slot_mapping, request_indices = memory.take(4, total)
        token_indices, block_table_indices, block_numbers, block_offsets = self._by_token[:, :total]
        rows[:], counts[:] = slots, num_scheduled_tokens
        np.add(_take(self.num_computed_tokens, rows, computed), counts, out=seq_lens)
        query_start_loc[0] = 0
        np.cumsum(counts, out=query_start_loc[1:])
        # The number of each token's request counts up where a request begins.
        block_offsets[:] = 0
        block_offsets[query_start_loc[1:-1]] = 1
        np.cumsum(block_offsets, out=token_indices)
        _take(rows, token_indices, request_indices)
        _take(np.subtract(computed, query_start_loc[:-1], out=shift), token_indices, positions)
        positions += self._arange[:total]
        np.multiply(request_indices, self.max_model_len, out=token_indices)
        token_indices += positions
        _take(self.token_ids, token_indices, input_ids)
        np.floor_divide(positions, self.block_size, out=block_table_indices)
        block_table_indices += np.multiply(request_indices, self.max_blocks_per_seq, out=block_numbers)
        _take(self.block_table, block_table_indices, block_numbers)
        np.remainder(positions, self.block_size, out=block_offsets)
        np.add(np.multiply(block_numbers, self.block_size, out=slot_mapping), block_offsets, out=slot_mapping)
        width = int(-(-seq_lens.max(initial=0) // self.block_size))
        block_table = memory.take(count, width)
        for row, slot in enumerate(slots):  # at once, numpy would make an array of their numbers
            block_table[row] = self.block_table[slot, :width]
        return StepInputs(
            request_indices=request_indices,
            positions=positions,
            token_indices=token_indices,
            input_ids=input_ids,
            block_table_indices=block_table_indices,
            block_numbers=block_numbers,
            block_offsets=block_offsets,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            num_computed_tokens=computed,
            num_tokens=counts,
            block_table=block_table,
            axes=memory.take(3, total),
            key_ranges=self._key_ranges[:total],
            after_input=self._after_input[:total],
            read=self._arange[:total],
        )


def _take(table: IntArray, indices: IntArray, out: IntArray) -> IntArray:
    """Copy entries of a table, numbered row after row, without memory of its own: that is what "clip" says."""
    return table.reshape(-1).take(indices, out=out, mode="clip")
