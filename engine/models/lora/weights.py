"""The weights of an adapter, from the checkpoint's names and shapes to those of fused layers.

q_proj  A [r, k]  B [n_q, r]      qkv_proj   A [2 r, k]     one below the other
v_proj  A [r, k]  B [n_v, r]                 B [n, 2 r]     q's at its rows and first columns, v's at its own
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.model_info import ModelInfo
from engine.models.base import DecoderModel
from engine.models.checkpoint import Checkpoint
from engine.models.checkpoint_index import CheckpointError
from engine.models.layers import Linear
from engine.models.lora.config import ADAPTER_STEM, adapter_error, read_lora_config
from engine.models.registry import make_decoder

LowRank = tuple[Tensor, Tensor]
"""A [r, in_features] and B [out_features, r], which has the factor in it: x A^T B^T is added to a layer's output."""
_WRAPPED: Final = "base_model.model."
"""PEFT's prefix of the names in the trained model."""


@dataclass(frozen=True)
class _Pair:
    """The tensors `down` and `up` of a checkpoint, for `rows` of a fused layer."""

    rows: slice
    rank: int
    down: str
    up: str
    factor: float


class AdapterFiles:
    """The adapters in their folders, read as weights of one decoder.

    `layers` are those that adapters may change, by name: all linear ones but the output head.
    """

    def __init__(self, model: DecoderModel, info: ModelInfo) -> None:
        named = model.named_modules()
        self.layers = {name: one for name, one in named if isinstance(one, Linear) and name.startswith("layers.")}
        self._prints = {name: info.adapter_fingerprint(name) for name in info.adapters}
        self._info, self._layout = info, model.layout
        heads, kv_heads, width = model.spec.num_heads, model.spec.num_kv_heads, model.spec.head_dim
        rows_of = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
        self._parts: dict[str, tuple[str, slice]] = {}  # layer and rows by the name in a checkpoint
        sources = make_decoder(info).sources()  # those of `model` lack quantised weights
        for name, layer in self.layers.items():
            first, parts = 0, [str(part).removesuffix(".weight") for part in sources[f"{name}.weight"]]
            for part in parts:
                end = first + rows_of.get(part.rpartition(".")[2], layer.out_features // len(parts))
                self._parts[part], first = (name, slice(first, end)), end

    def num_values(self, name: str) -> int:
        """Return the size of an adapter in memory. Raises CheckpointError where it does not fit the decoder."""
        with Checkpoint(self._info.adapters[name], ADAPTER_STEM) as checkpoint:
            found = self._pairs(name, checkpoint)
        layers = ((self.layers[layer], sum(one.rank for one in pairs)) for layer, pairs in found.items())
        return sum(rank * (layer.in_features + layer.out_features) for layer, rank in layers)

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> dict[str, LowRank]:
        """Return the weights of an adapter by layer.

        Raises CheckpointError or OSError where they cannot be read, or are others than at the start.
        """
        if self._info.adapter_fingerprint(name) != self._prints[name]:
            raise CheckpointError("its files have changed since the start; start again to serve them")
        found = {}
        with Checkpoint(self._info.adapters[name], ADAPTER_STEM) as checkpoint:
            for layer, pairs in self._pairs(name, checkpoint).items():
                down = torch.empty(sum(one.rank for one in pairs), self.layers[layer].in_features)
                up, end = torch.zeros(self.layers[layer].out_features, len(down)), 0
                for one in pairs:
                    first, end = end, end + one.rank
                    piece = torch.empty(one.rows.stop - one.rows.start, one.rank)
                    checkpoint.read_into(one.down, down[first:end])
                    checkpoint.read_into(one.up, piece)
                    up[one.rows, first:end] = piece.mul_(one.factor)
                found[layer] = down.to(device, dtype), up.to(device, dtype)
        return found

    def _pairs(self, name: str, checkpoint: Checkpoint) -> dict[str, list[_Pair]]:
        """Return an adapter's pairs by layer. Raises CheckpointError naming a tensor that does not fit."""
        config = read_lora_config(name, self._info.adapters[name])
        entries, pairs = checkpoint.entries, defaultdict[str, list[_Pair]](list)
        for down in sorted(entries):
            trained, _, end = down.removeprefix(_WRAPPED).rpartition(".lora_")
            place = self._parts.get(self._layout.local_name(trained) or "")
            if end not in ("A.weight", "B.weight") or place is None:
                raise adapter_error(name, f"changes {down}, which is no linear layer in {self._info.name}'s decoder")
            up = f"{down.removesuffix(end)}{'B' if end[0] == 'A' else 'A'}.weight"
            if up not in entries:
                raise adapter_error(name, f"has half a pair: {down} without {up}")
            if end == "A.weight":
                layer, rows = place
                shapes, rank = [entries[down].shape, entries[up].shape], (*entries[down].shape, 0)[0]
                wanted = [(rank, self.layers[layer].in_features), (rows.stop - rows.start, rank)]
                if shapes != wanted or rank < 1:
                    raise adapter_error(name, f"has shapes {shapes} for {trained}, which needs {wanted}")
                pairs[layer].append(_Pair(rows, rank, down, up, config.factor(trained, rank)))
        if not pairs:
            raise adapter_error(name, "has no weights")
        return pairs
