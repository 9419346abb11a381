"""The text decoder of Qwen3-VL: Qwen3, with image features added again after the first layers.

An encoder output has 1 + k times the hidden size of columns. The first part replaces embeddings; part k is added to
the hidden states of the same tokens behind layer k (DeepStack, Meng et al., 2024).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from common.model_info import ModelInfo
from engine.models.base import AttentionContext
from engine.models.llama import LlamaDecoder


class Qwen3VLDecoder(LlamaDecoder):
    """Qwen3's layers with interleaved M-RoPE; the first `num_deepstack` layers add features to image tokens."""

    def __init__(self, info: ModelInfo) -> None:
        """Raises ValueError for an unsupported configuration."""
        super().__init__(info)
        num_deepstack = len(info.config["vision_config"]["deepstack_visual_indexes"])
        if num_deepstack >= self.config.num_layers:  # behind the last layer not all rows are there
            raise ValueError(f"{num_deepstack} deep-stacked outputs for a decoder of {self.config.num_layers} layers")
        self.num_deepstack = num_deepstack
        self.spec = replace(self.spec, encoder_hidden_size=(1 + num_deepstack) * self.config.hidden_size)

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        rotation = self.rotary(positions, embeddings.dtype)
        added = attention.encoder_rows
        deepstack = [] if added is None else added.outputs.chunk(1 + self.num_deepstack, dim=-1)[1:]
        hidden, residual = embeddings, None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, rotation, attention)
            if added is not None and index < len(deepstack):
                hidden, residual = hidden.add_(residual).index_add_(0, added.rows, deepstack[index]), None
        normed: Tensor = self.norm(hidden, residual)
        return normed
