"""Interfaces between the engine and models. Batches are flattened: a row per token, of any sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.device.h2d import send_tensor
from engine.models.layers import Linear, linear
from engine.processors import ProcessedInput
from engine.state.bias import AttentionBias
from engine.state.inputs import EncoderRows
from engine.state.spec import DecoderSpec


class AttentionContext(Protocol):
    """A model's view of attention during a forward pass, without the location of KV.

    `has_cross` is False where no token of the step has encoder rows to read. `after_input` [num_tokens], bool, tells
    which tokens are placeholders of inputs or stand behind one; None where all do. `encoder_rows` are outputs of
    encoders of more than `hidden_size` columns, whose first ones stand in the embeddings already; None without any.
    """

    @property
    def has_cross(self) -> bool: ...

    @property
    def after_input(self) -> Tensor | None: ...

    @property
    def encoder_rows(self) -> EncoderRows | None: ...

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Write key and value to the cache, then attend causally within each sequence.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query.
        `scale` is 1 / sqrt(head_dim) if not given; `bias` is added to the scaled scores. With a `window`, a token sees
        the last `window` tokens, itself included.
        """

    def select_read(self, x: Tensor) -> Tensor:
        """Return the rows of x [num_tokens, ...] whose hidden states are read: of tokens to sample behind.

        A decoder may go on with these alone behind the attention of its last layer, row by row. Of the others only keys
        and values have a use. In a recorded step the rows that are read come first, and anything behind them.
        """

    def cross_attention(
        self, layer: int, query: Tensor, *, scale: float | None = None, bias: AttentionBias | None = None
    ) -> Tensor:
        """Attend to the visible encoder rows of each token, by default all rows of the request.

        query [num_tokens, num_heads, head_dim] -> the same; `scale` and `bias` as above. `layer` counts cross-attention
        layers. A token that sees no row gets zeros.
        """


@dataclass(frozen=True)
class CheckpointLayout:
    """The tensors of a module in a checkpoint, under any historical name.

    `prefixes` maps each prefix of ours to what replaces it; one without a dot at its end is a whole name. `others` are
    prefixes of other modules that one of ours is a prefix of: the longest match decides. `ignored` are endings of
    tensors that are computed, not loaded.
    """

    prefixes: Mapping[str, str]
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def local_name(self, name: str) -> str | None:
        """Return the name within the module, or None for a tensor of another module."""
        known = (*self.prefixes, *self.others)
        matches = [one for one in known if (name.startswith(one) if one.endswith(".") else name == one)]
        prefix = max(matches, key=len, default="")
        if prefix not in self.prefixes or name.endswith(self.ignored):
            return None
        return self.prefixes[prefix] + name.removeprefix(prefix)


def with_and_without_model(prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return prefixes as old checkpoints have them, and as new ones, which begin with `model.`."""
    return {outer + theirs: ours for outer in ("", "model.") for theirs, ours in prefixes.items()}


@dataclass(frozen=True)
class Zeros:
    """Rows of a fused tensor without a source in the checkpoint."""

    rows: int


Sources = dict[str, tuple[str | Zeros, ...]]
"""For each parameter, the checkpoint tensors (by local name) whose rows it is made of, in order."""


def fused_sources(module: nn.Module, parts: Mapping[str, tuple[str, ...]]) -> Sources:
    """Return the sources of all parameters of a module. A leaf in `parts`, for instance `qkv_proj`, is made of the
    checkpoint's leaves listed there; every other leaf is its own source."""
    sources: Sources = {}
    for name, _ in module.named_parameters():
        leaf = name.split(".")[-2] if "." in name else name
        sources[name] = tuple(name.replace(leaf, part) for part in parts.get(leaf, (leaf,)))
    return sources


def split_key_value(key_value: Tensor, spec: DecoderSpec) -> tuple[Tensor, Tensor]:
    """Split the output of a fused linear layer: [m, 2 * num_kv_heads * head_dim] -> 2 x [m, num_kv_heads, head_dim]."""
    key, value = key_value.view(len(key_value), 2, spec.num_kv_heads, spec.head_dim).unbind(1)
    return key, value


class DecoderModel(nn.Module, ABC):
    """A decoder. `forward` runs between `embed` and `logits`: encoder outputs can replace embeddings in between."""

    spec: DecoderSpec
    layout: CheckpointLayout
    embed_tokens: nn.Embedding
    lm_head: Linear | None
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    """The checkpoint's layers that each fused layer is made of."""

    def sources(self) -> Sources:
        """Return the checkpoint tensors of each parameter."""
        return fused_sources(self, self.parts)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        return F.embedding(input_ids, self.embed_tokens.weight)

    @abstractmethod
    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """Hidden states after the final norm.

        embeddings [num_tokens, hidden_size], positions int64 [num_tokens] or, with M-RoPE, [3, num_tokens] (time,
        height, width) -> [num_tokens, hidden_size], or as many rows as `attention.select_read` has left.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[k, hidden_size] -> [k, vocab_size]"""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight)

    def project_cross(self, layer: int, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer's cross-attention: [m, encoder_hidden] -> 2 x [m, num_kv_heads, head_dim].

        Raises TypeError for a model without cross-attention.
        """
        raise TypeError(f"{type(self).__name__} has no cross-attention to project encoder outputs for")


class EncoderModel(ABC):
    """An encoder for items of many requests in a batch. `module` is transformers' own, with parts replaced or not.

    `unmasked` is the part of it whose attention never has a mask, so that a kernel for whole sequences serves it.
    `padded` is the part that masks padding alone: FlashInfer serves it where layers are told the beginnings of rows.
    """

    module: nn.Module
    layout: CheckpointLayout
    unmasked: nn.Module | None = None
    padded: nn.Module | None = None

    def finish_loading(self, device: torch.device) -> None:  # noqa: B027  (most encoders have nothing to do)
        """Compute buffers missing in checkpoints on `device`; called once after loading the weights."""

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        """Return an array on the device and in the dtype of the weights."""
        weight = next(self.module.parameters())
        return send_tensor(torch.from_numpy(array), weight.device, weight.dtype)

    @abstractmethod
    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        """Return an output [num_encoder_tokens, hidden_size] per item, equal to the output of the item alone.

        Called in inference mode.
        Outputs may be views of one batch: the caller copies an output that outlives the others.
        """
