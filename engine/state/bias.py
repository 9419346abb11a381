"""Biases and masks of attention, as models ask for them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.state.request import Request


class AttentionBias(ABC):
    """Adds to the scaled scores of attention, by positions and, with `by_request`, by request.

    Minus infinity hides a key; every token must keep one. In self-attention keys are positions of the same sequence:
    those behind the token stay hidden. In cross-attention keys are rows of the request's encoder outputs. Prompts are
    computed in parts, and KV is shared by requests that begin alike: a token's row may depend on nothing behind it.

    Backends evaluate a bias once per request and step, and know the result by the object: a model passes the same
    object in every layer. The model's `spec.biased` names the kinds of attention with a bias.
    """

    by_request: bool = False

    @abstractmethod
    def values(self, queries: Tensor, keys: Tensor, request: Request | None) -> Tensor:
        """Return the addends of tokens at positions `queries` [q] for `keys` [k]: [num_heads or 1, q, k].

        `request` is None unless `by_request`.
        """


class AttentionMask(AttentionBias):
    """A bias that hides keys and does nothing else, for all heads alike: FlashInfer has kernels for it."""

    @abstractmethod
    def seen(self, queries: Tensor, keys: Tensor, request: Request | None) -> Tensor:
        """Return which `keys` [k] tokens at positions `queries` [q] see: bool [q, k]."""

    def values(self, queries: Tensor, keys: Tensor, request: Request | None) -> Tensor:
        seen = self.seen(queries, keys, request)
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[None]
