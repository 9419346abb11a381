"""The newest token of every running sequence, on the device.

A step can be launched before the host has seen the tokens sampled by the step before. The sampled tokens are written
here without leaving the device, and stand in for ids that the host does not know yet.

    step N     sample ── put ──▶ tokens[slot]
    step N+1   input_ids  7 -1 -1        slots 2 0 5      -1: not known on the host
               fill       7 tokens[0] tokens[5]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.h2d import send


class LastTokens:
    """`tokens`, int64 [max_num_seqs], by the slot of a running sequence.

    All work is queued on the current stream; nothing waits for the device.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def put(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Store `tokens` [k], on the device, as the newest tokens of the sequences in `slots`."""
        [rows] = send(self.tokens.device, np.array(slots, np.int64))
        self.tokens.index_copy_(0, rows, tokens.to(torch.int64))

    def fill(self, input_ids: Tensor, slots: Tensor) -> Tensor:
        """Replace input_ids [n] below 0 by the newest token of the sequence in slots int64 [n]."""
        return torch.where(input_ids < 0, self.tokens[slots], input_ids)
