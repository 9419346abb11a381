"""A fast training forward over the Hugging Face module's own weights.

The reference loops over pictures and windows in the vision tower. Here a batch holds pictures of one size, so that
one masked attention serves them all; matrices are multiplied in bfloat16 from float32 master weights.
`tests/signpost` compares this forward with the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLForConditionalGeneration

PATCH = 14


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    # On a CPU the backward pass of the fused bfloat16 kernel is far slower than plain products at these lengths.
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))
    return torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), value)


class BatchedForward:
    """The model's forward pass for batches of same-size pictures."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.dtype = model, dtype
        self.vision_config, self.text_config = model.config.vision_config, model.config.text_config
        self._grids: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}

    @property
    def embedding(self) -> Tensor:
        """The tied embedding, [vocabulary, hidden], in the compute type."""
        embedding: Tensor = self.model.model.language_model.embed_tokens.weight
        return embedding.to(self.dtype)

    def _linear(self, x: Tensor, layer: Any) -> Tensor:
        bias = layer.bias.to(self.dtype) if layer.bias is not None else None
        return F.linear(x, layer.weight.to(self.dtype), bias)

    def _norm(self, x: Tensor, layer: Any) -> Tensor:
        return _rms_norm(x, layer.weight.to(self.dtype))

    def _grid(self, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotary cosines and sines of the patches of a picture, and the mask of its windows (None if it is one)."""
        if size not in self._grids:
            columns, rows = size[0] // PATCH, size[1] // PATCH
            shape = (rows // 2, columns // 2, 2, 2)
            row = torch.arange(rows).view(rows // 2, 1, 2, 1).expand(shape).reshape(-1)
            column = torch.arange(columns).view(1, columns // 2, 1, 2).expand(shape).reshape(-1)
            half = self.vision_config.hidden_size // self.vision_config.num_heads // 2
            inverse = 1 / 10000 ** (torch.arange(0, half, 2).float() / half)
            angles = torch.cat([row[:, None] * inverse, column[:, None] * inverse] * 2, -1)
            across = self.vision_config.window_size // PATCH
            window = (row // across) * 100 + column // across
            mask = torch.zeros(len(row), len(row), dtype=self.dtype)
            mask = mask.masked_fill(window[:, None] != window[None], float("-inf"))
            several = window.unique().numel() > 1
            self._grids[size] = angles.cos().to(self.dtype), angles.sin().to(self.dtype), mask if several else None
        return self._grids[size]

    def vision(self, patches: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Run the vision tower.

        Args:
            patches: normalised, [pictures, patches, 3 * 14 * 14], one frame.
            size: width and height in pixels.

        Returns:
            The picture tokens, [pictures, patches / 4, hidden], and the normed patch states before merging.
        """
        tower: Any = self.model.model.visual
        cos, sin, window_mask = self._grid(size)
        # A still picture's two frames are the same, so the two halves of the kernel add up.
        x = F.linear(patches.to(self.dtype), tower.patch_embed.proj.weight.sum(2).flatten(1).to(self.dtype))
        for index, block in enumerate(tower.blocks):
            mask = None if index in self.vision_config.fullatt_block_indexes else window_mask
            x = x + self._vision_attention(self._norm(x, block.norm1), block.attn, cos, sin, mask)
            y = self._norm(x, block.norm2)
            gate = F.silu(self._linear(y, block.mlp.gate_proj))
            x = x + self._linear(gate * self._linear(y, block.mlp.up_proj), block.mlp.down_proj)
        states = self._norm(x, tower.merger.ln_q)
        pictures, patch_count, width = states.shape
        merged = F.gelu(self._linear(states.view(pictures, patch_count // 4, 4 * width), tower.merger.mlp[0]))
        return self._linear(merged, tower.merger.mlp[2]), states

    def _vision_attention(self, x: Tensor, layer: Any, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        pictures, length, width = x.shape
        heads = self.vision_config.num_heads
        qkv = self._linear(x, layer.qkv).view(pictures, length, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = _attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value, mask)
        return self._linear(out.transpose(1, 2).reshape(pictures, length, width), layer.proj)

    def text(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the language model over embeddings.

        Args:
            x: [sequences, length, hidden].
            positions: multimodal rotary positions (time, row, column), [3, sequences, length].
            mask: additive, [sequences, 1, length, length].

        Returns:
            The normed last states, [sequences, length, hidden].
        """
        cos, sin = self._text_rotary(positions)
        language: Any = self.model.model.language_model
        for block in language.layers:
            x = x + self._text_attention(self._norm(x, block.input_layernorm), block.self_attn, cos, sin, mask)
            y = self._norm(x, block.post_attention_layernorm)
            gate = F.silu(self._linear(y, block.mlp.gate_proj))
            x = x + self._linear(gate * self._linear(y, block.mlp.up_proj), block.mlp.down_proj)
        return self._norm(x, language.norm)

    def _text_rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.text_config
        head = config.hidden_size // config.num_attention_heads
        inverse = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head, 2).float() / head)
        parts = (positions[..., None].float() * inverse).split(config.rope_parameters["mrope_section"], -1)
        angles = torch.cat([part[axis] for axis, part in enumerate(parts)] * 2, -1)
        return angles.cos().to(self.dtype)[:, None], angles.sin().to(self.dtype)[:, None]

    def _text_attention(self, x: Tensor, layer: Any, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        sequences, length, width = x.shape
        heads, key_heads = self.text_config.num_attention_heads, self.text_config.num_key_value_heads
        head = width // heads
        query = self._linear(x, layer.q_proj).view(sequences, length, heads, head).transpose(1, 2)
        key = self._linear(x, layer.k_proj).view(sequences, length, key_heads, head).transpose(1, 2)
        value = self._linear(x, layer.v_proj).view(sequences, length, key_heads, head).transpose(1, 2)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        repeat = heads // key_heads
        out = _attention(query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), mask)
        return self._linear(out.transpose(1, 2).reshape(sequences, length, width), layer.o_proj)
