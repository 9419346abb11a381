"""What the engine asks of a model. Batches are flattened: one row per token, whatever sequence it belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.processors import ProcessedInput


@dataclass(frozen=True)
class DecoderSpec:
    """The sizes by which the engine lays out caches and checks requests. `max_model_len` is in tokens."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    has_cross_attention: bool
    mrope_section: tuple[int, int, int] | None
    max_model_len: int


class AttentionContext(Protocol):
    """Attention as a model sees it during one forward pass: where keys and values live is not its business."""

    def self_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key and value to the cache, then attend causally within each sequence, at scale 1 / sqrt(head_dim).

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query.
        """

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to all encoder rows of each token's request; query [num_tokens, num_heads, head_dim] -> the same."""


@dataclass(frozen=True)
class CheckpointLayout:
    """Which tensors of a checkpoint are a module's, under any of the names that they had over the years.

    `prefixes` maps each prefix of ours to what replaces it. `others` are prefixes of other modules that one of ours
    is a prefix of: the longest match decides. `ignored` are endings of tensors that are computed, not loaded.
    """

    prefixes: Mapping[str, str]
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def local_name(self, name: str) -> str | None:
        """The name within the module, or None for a tensor that is not the module's to load."""
        matches = [prefix for prefix in (*self.prefixes, *self.others) if name.startswith(prefix)]
        prefix = max(matches, key=len, default="")
        if prefix not in self.prefixes or name.endswith(self.ignored):
            return None
        return self.prefixes[prefix] + name.removeprefix(prefix)


@dataclass(frozen=True)
class Zeros:
    """Rows of a fused tensor that no checkpoint tensor fills."""

    rows: int


Sources = dict[str, tuple[str | Zeros, ...]]
"""For each parameter, the checkpoint tensors (by local name) whose rows it is made of, in order."""


class DecoderModel(nn.Module, ABC):
    """A decoder. `forward` runs between `embed` and `logits`, so that encoder outputs can replace embeddings."""

    spec: DecoderSpec
    layout: CheckpointLayout

    @abstractmethod
    def sources(self) -> Sources:
        """Which checkpoint tensors each parameter is made of."""

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""

    @abstractmethod
    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """Hidden states after the final norm.

        embeddings [num_tokens, hidden_size], positions int64 [num_tokens] or, with M-RoPE, [3, num_tokens] (time,
        height, width) -> [num_tokens, hidden_size].
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[k, hidden_size] -> [k, vocab_size]"""

    def project_cross(self, layer: int, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer's cross-attention: [m, encoder_hidden] -> 2 x [m, num_kv_heads, head_dim].

        Raises TypeError for a model without cross-attention.
        """
        raise TypeError(f"{type(self).__name__} has no cross-attention to project encoder outputs for")


class EncoderModel(ABC):
    """An encoder that takes items of many requests in one batch. `module` is transformers' own."""

    module: nn.Module
    layout: CheckpointLayout

    @abstractmethod
    def finish_loading(self, device: torch.device) -> None:
        """Compute on `device` what no checkpoint holds; called once its weights are in place."""

    @abstractmethod
    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        """One output [num_encoder_tokens, hidden_size] per item, equal to what the item alone would give."""


@dataclass(frozen=True)
class LoadReport:
    """What a load took: checkpoint tensors by name, bytes read and bytes held, seconds."""

    names: tuple[str, ...]
    read_bytes: int
    parameter_bytes: int
    seconds: float
