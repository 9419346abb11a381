"""Whisper's decoder (Radford et al., 2022): pre-norm, learned positions, cross-attention to the encoder's frames."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.bart import CHECKPOINT_PARTS
from engine.models.base import (
    AttentionContext,
    CheckpointLayout,
    DecoderModel,
    EncoderRows,
    Sources,
    Zeros,
    fused_sources,
    split_key_value,
)
from engine.models.config import is_tied
from engine.models.layers import Linear, linear
from engine.state.spec import DecoderSpec

DECODER_LAYOUT = CheckpointLayout(prefixes={"model.decoder.": "", "decoder.": "", "proj_out.": "proj_out."})


def build(info: ModelInfo) -> WhisperDecoder:
    """The decoder of a model folder."""
    return WhisperDecoder(info.config, max_model_len=info.max_model_len, tied=is_tied(info, default=True))


class WhisperDecoder(DecoderModel):
    """`config` is the model's config.json. Positions count from 0 and are added inside `forward`.

    Raises ValueError for an activation that is not computed here.
    """

    def __init__(self, config: dict[str, Any], *, max_model_len: int, tied: bool) -> None:
        super().__init__()
        activation = config.get("activation_function", "gelu")
        if activation != "gelu":
            raise ValueError(f"activation {activation!r} is not supported; supported: gelu")
        hidden_size, num_heads, vocab_size = config["d_model"], config["decoder_attention_heads"], config["vocab_size"]
        self.spec = DecoderSpec(
            num_layers=config["decoder_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_cross_layers=config["decoder_layers"],
        )
        self.layout = DECODER_LAYOUT
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_positions = nn.Embedding(config["max_target_positions"], hidden_size)
        self.layers = nn.ModuleList(
            WhisperLayer(self.spec, config["decoder_ffn_dim"], index) for index in range(self.spec.num_layers)
        )
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.proj_out = None if tied else Linear(hidden_size, vocab_size, bias=False)

    def embed(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embed_tokens.weight)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        encoder_rows: EncoderRows | None = None,
    ) -> Tensor:
        hidden = embeddings + F.embedding(positions, self.embed_positions.weight)
        for layer in self.layers:
            hidden = layer(hidden, attention)
        normed: Tensor = self.layer_norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.proj_out is None else self.proj_out
        return linear(hidden, head.weight)

    def project_cross(self, layer: int, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.layers[layer].get_submodule("cross_kv_proj")(encoder_output)
        return split_key_value(projected, self.spec)

    def sources(self) -> Sources:
        sources = fused_sources(self, CHECKPOINT_PARTS)
        for name, parts in sources.items():
            if name.endswith(".bias"):  # Whisper's keys have none
                no_bias = Zeros(self.spec.hidden_size)
                sources[name] = tuple(no_bias if str(part).endswith("k_proj.bias") else part for part in parts)
        return sources


class WhisperLayer(nn.Module):
    """Self-attention, cross-attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, spec: DecoderSpec, ffn_dim: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads = (spec.num_heads, spec.head_dim)
        size = spec.hidden_size
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.qkv_proj = Linear(size, 3 * size)
        self.self_out_proj = Linear(size, size)
        self.encoder_attn_layer_norm = nn.LayerNorm(size)
        self.cross_q_proj = Linear(size, size)
        self.cross_kv_proj = Linear(size, 2 * size)
        self.cross_out_proj = Linear(size, size)
        self.final_layer_norm = nn.LayerNorm(size)
        self.fc1 = Linear(size, ffn_dim)
        self.fc2 = Linear(ffn_dim, size)

    def forward(self, hidden: Tensor, attention: AttentionContext) -> Tensor:
        num_tokens = len(hidden)
        qkv = self.qkv_proj(self.self_attn_layer_norm(hidden)).view(num_tokens, 3, *self.heads)
        attended = attention.self_attention(self.index, *qkv.unbind(1))
        hidden = self.self_out_proj(attended.reshape(num_tokens, -1)).add_(hidden)
        query = self.cross_q_proj(self.encoder_attn_layer_norm(hidden)).view(num_tokens, *self.heads)
        attended = attention.cross_attention(self.index, query)
        hidden = self.cross_out_proj(attended.reshape(num_tokens, -1)).add_(hidden)
        output: Tensor = self.fc2(F.gelu(self.fc1(self.final_layer_norm(hidden))))
        return output.add_(hidden)
