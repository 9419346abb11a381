"""Sizes of a decoder, shared by models, attention, runner and handoff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]

Table: TypeAlias = Literal["self", "cross"]
"""The KV of a request's tokens, or the KV that its cross-attention reads."""


@dataclass(frozen=True)
class DecoderSpec:
    """The sizes that determine cache layout and request checks. `max_model_len` is in tokens.

    Layers of self-attention and of cross-attention are counted apart: a block of the KV cache belongs to one kind, and
    both kinds use the first of `num_caches` tensors. `encoder_width` is the row width of encoder outputs.
    Of the `num_embeddings` token ids allowed in a prompt, the first `vocab_size` can be generated. `biased`
    names the kinds of attention with a bias or mask. `windows` lists the distinct windows of self-attention; None means
    all keys. `whole_input_tokens`: the tokens of an input, so many at most, see each other in both directions and are
    computed in one step; 0 for a causal decoder.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    num_cross_layers: int = 0
    mrope_section: tuple[int, int, int] | None = None
    encoder_hidden_size: int | None = None
    extra_embeddings: int = 0
    biased: tuple[Table, ...] = ()
    windows: tuple[int | None, ...] = (None,)
    whole_input_tokens: int = 0

    @property
    def has_cross_attention(self) -> bool:
        return self.num_cross_layers > 0

    @property
    def num_caches(self) -> int:
        return max(self.num_layers, self.num_cross_layers)

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size + self.extra_embeddings

    @property
    def encoder_width(self) -> int:
        """Columns of an encoder output; more than `hidden_size` where deeper layers get a share (Qwen3-VL)."""
        return self.encoder_hidden_size or self.hidden_size


@dataclass(frozen=True)
class HeadSpec:
    """The heads of a decoder's attention layers.

    With `biased`, attention adds a bias, or masks keys. `windows` lists the distinct windows of self-attention;
    None means all keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    biased: bool = False
    windows: tuple[int | None, ...] = (None,)

    @classmethod
    def of(cls, spec: DecoderSpec) -> HeadSpec:
        """Return the heads of a decoder."""
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim, bool(spec.biased), spec.windows)
