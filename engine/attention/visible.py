"""Visible keys of a request's tokens: causal, within a window, or a range per token; and attention of single tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.device.h2d import send
from engine.state.spec import IntArray


@dataclass(frozen=True)
class Visible:
    """Keys `first` .. `last` are visible to some token; `hidden` [num_queries, num_keys] is True for hidden pairs.

    `hidden` is None where every token sees all of them, and `triangular` where it is a plain lower triangle. `blind`
    [num_queries] marks tokens that see nothing; None where there are none. Both are on the device of the attention.
    """

    first: int
    last: int
    hidden: torch.Tensor | None = None
    triangular: bool = False
    blind: torch.Tensor | None = None

    @property
    def num_keys(self) -> int:
        return self.last - self.first

    def hide(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [..., num_queries, num_keys] with -inf for hidden pairs."""
        return values if self.hidden is None else values.masked_fill(self.hidden, float("-inf"))


def causal_keys(num_queries: int, seq_len: int, window: int | None, device: torch.device) -> Visible:
    """Return the keys of causal queries, the last tokens of the keys, within the window.

    keys     0 1 2 3 4 5      num_queries 2, seq_len 6, window 3
    query 4      x x x .
    query 5        x x x
             first = 2
    """
    past = seq_len - num_queries
    first = 0 if window is None else max(0, past - window + 1)
    if num_queries == 1:
        return Visible(first, seq_len)
    positions = torch.arange(first, seq_len, device=device)
    queries, keys = positions[past - first :, None], positions[None]
    hidden = keys > queries
    narrow = window is not None and window < seq_len
    if narrow:
        assert window is not None
        hidden |= keys <= queries - window
    return Visible(first, seq_len, hidden, triangular=past == 0 and not narrow)


def decode_mask(
    num_keys: torch.Tensor,
    max_keys: int,
    dtype: torch.dtype,
    num_kv_heads: int,
    values: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Return the mask of a token per request, of `num_keys` [num_requests] keys each, for `attend_once`.

    0, or a bias's `values` [num_heads or 1, num_requests, max_keys], for existing keys within the window, -inf for all
    others: [num_requests, 1 or num_kv_heads, 1 or heads per group, max_keys]. Requests without keys see the first one,
    for a softmax over nothing would be NaN.
    """
    keys = torch.arange(max_keys, device=num_keys.device)
    hidden = keys >= num_keys[:, None].clamp(min=1)
    if window is not None:
        hidden |= keys < num_keys[:, None] - window
    if values is None:
        values = torch.zeros(1, *hidden.shape, device=hidden.device)
    return grouped(values.to(dtype).masked_fill(hidden, float("-inf")).transpose(0, 1), num_kv_heads)


def grouped(mask: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[n, num_heads or 1, num_keys] or [n, num_heads or 1, 1, num_keys] -> as `attend_once` takes a mask."""
    num_heads = mask.shape[1]
    groups = min(num_kv_heads, num_heads), max(1, num_heads // num_kv_heads)
    return mask.reshape(len(mask), *groups, mask.shape[-1])


def attend_once(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attend with a token per request: the query heads of a group are the query length, so keys are never repeated.

    query [n, num_heads, head_dim], keys and values [n, num_kv_heads, num_keys, head_dim] -> as query.
    """
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(len(query), num_kv_heads, -1, query.shape[2])
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).reshape(query.shape)


def keys_in_ranges(ranges: IntArray, device: torch.device) -> Visible:
    """Return the keys within each token's range [num_queries, 2]."""
    starts, ends = ranges[:, 0], ranges[:, 1]
    empty = ends <= starts
    if empty.all():
        return Visible(0, 0)
    first, last = int(starts[~empty].min()), int(ends[~empty].max())
    if not empty.any() and (starts == first).all() and (ends == last).all():
        return Visible(first, last)
    keys = np.arange(first, last)[None]
    seen = (keys >= starts[:, None]) & (keys < ends[:, None])
    # A softmax over nothing would be NaN; rows that see nothing become zeros behind it.
    hidden, blind = send(device, ~seen & ~empty[:, None], empty)
    return Visible(first, last, hidden, blind=blind if empty.any() else None)
