"""What attention has to know about one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """One attention kind (self or cross) for one forward pass.

    Requests with a single query token (decodes) come first, `num_decodes` of them.

    query_start_loc  [num_requests + 1] on the host: tokens of request i are query_start_loc[i] .. [i + 1]
    seq_lens         [num_requests] on the host: keys that request i attends to, those of this step included
    block_table      [num_requests, max_blocks] on the device
    slot_mapping     [num_tokens] on the device: where each token's key and value are written; None for cross-attention,
                     whose blocks are read-only
    """

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    block_lists: list[list[int]]
    slot_mapping: torch.Tensor | None
    causal: bool
    num_decodes: int

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)
