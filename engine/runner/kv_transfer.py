"""Copy KV between the paged cache and plain tensors of tokens, whatever the block size on either side.

as it travels   [num_tokens, layers, 2, num_kv_heads, head_dim]
in the cache    per layer [2, num_blocks, block_size, num_kv_heads, head_dim]; a block table says where token i is
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.copy_stream import AsyncCopy, CopyStream
from engine.device.h2d import send


def read_tokens(
    caches: Sequence[Tensor], block_table: Sequence[int], first: int, last: int, side: CopyStream
) -> AsyncCopy:
    """Tokens `first` to `last` (not included) of a table, over the layers of `caches`: contiguous, for the CPU.

    They are gathered in the order of the steps; from a GPU they come in one copy beside those that follow.
    """
    slots = slots_of(caches[0], block_table, first, last)
    shape = (len(slots), len(caches), 2, *caches[0].shape[3:])
    tokens = torch.empty(shape, dtype=caches[0].dtype, device=caches[0].device)
    for layer, cache in enumerate(caches):
        tokens[:, layer] = cache.flatten(1, 2).index_select(1, slots).transpose(0, 1)
    return side.fetch(tokens)


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
