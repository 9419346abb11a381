"""Copies of KV: between blocks (copy on write, swapping), and between the paged cache and plain tensors of tokens.

as it travels   [num_tokens, layers, 2, num_kv_heads, head_dim], whatever the block size on either side
in the cache    per layer [2, num_blocks, block_size, num_kv_heads, head_dim]; a block table says where token i is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.cache.block_manager import BlockMove
from engine.device.h2d import send
from engine.device.pending_tensor import PendingTensor


def move_blocks(moves: Sequence[BlockMove], caches: Sequence[Tensor], host_cache: Callable[[int], Tensor]) -> None:
    """Queue the moves in order, in every layer, on the current stream.

    caches        per layer [2, num_blocks, block_size, num_kv_heads, head_dim]
    host_cache    the same of a layer on the host, asked for where a move needs it; pinned if the caches are on CUDA
    """
    for kind, group in groupby(moves, key=lambda move: move.kind):
        for batch in _independent(list(group)):
            for layer, cache in enumerate(caches):
                source = host_cache(layer) if kind == "in" else cache
                target = host_cache(layer) if kind == "out" else cache
                if source.device == target.device:
                    _copy(source, target, batch)
                else:
                    copy_runs(source, target, batch)


def _copy(source: Tensor, target: Tensor, moves: Sequence[BlockMove]) -> None:
    pairs = np.array([(move.source, move.target) for move in moves]).T
    sources, targets = send(source.device, *pairs)
    target[:, targets] = source[:, sources]


def copy_runs(source: Tensor, target: Tensor, moves: Sequence[BlockMove]) -> None:
    """Copy each run of blocks, contiguous at both ends, at once.

    Between a device and pinned memory such copies need no help of the host: an index would, at the host's end.
    """
    for first, length in _runs(moves):
        sources, targets = slice(first.source, first.source + length), slice(first.target, first.target + length)
        for side in (0, 1):
            target[side, targets].copy_(source[side, sources], non_blocking=True)


def _runs(moves: Sequence[BlockMove]) -> Iterator[tuple[BlockMove, int]]:
    """Split moves into runs with sources and targets both counting up by 1: the first move and the length of each."""
    first, length = moves[0], 1
    for move in moves[1:]:
        if (move.source, move.target) == (first.source + length, first.target + length):
            length += 1
        else:
            yield first, length
            first, length = move, 1
    yield first, length


def _independent(moves: list[BlockMove]) -> Iterator[list[BlockMove]]:
    """Split moves into runs of a kind without a read of a block written in the same run."""
    batch: list[BlockMove] = []
    written: set[int] = set()
    for move in moves:
        if move.target in written or (move.kind == "copy" and move.source in written):
            yield batch
            batch, written = [], set()
        batch.append(move)
        written.add(move.target)
    if batch:
        yield batch


def read_tokens(caches: Sequence[Tensor], block_table: Sequence[int], first: int, last: int) -> PendingTensor:
    """Gather tokens `first` to `last` (not included) of a table, over the layers of `caches`, in the order of the
    steps: contiguous, on the caches' device."""
    slots = slots_of(caches[0], block_table, first, last)
    shape = (len(slots), len(caches), 2, *caches[0].shape[3:])
    tokens = torch.empty(shape, dtype=caches[0].dtype, device=caches[0].device)
    for layer, cache in enumerate(caches):
        tokens[:, layer] = cache.flatten(1, 2).index_select(1, slots).transpose(0, 1)
    return PendingTensor(tokens)


def write_tokens(caches: Sequence[Tensor], block_table: Sequence[int], first: int, tokens: Tensor) -> None:
    """Write `tokens`, already on the caches' device, to the slots of token `first` and the following tokens."""
    slots = slots_of(caches[0], block_table, first, first + len(tokens))
    for layer, cache in enumerate(caches):
        cache.flatten(1, 2).index_copy_(1, slots, tokens[:, layer].transpose(0, 1))


def slots_of(cache: Tensor, block_table: Sequence[int], first: int, last: int) -> Tensor:
    """int64 [last - first], on the cache's device: place of each token when the blocks of a layer are laid end to
    end."""
    block_size, begin = cache.shape[2], first // cache.shape[2]
    table = np.array(block_table[begin : -(-last // block_size)], np.int64)
    steps = np.arange(first - begin * block_size, last - begin * block_size)
    [slots] = send(cache.device, table[steps // block_size] * block_size + steps % block_size)
    return slots
