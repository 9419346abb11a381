"""BART's decoder (Lewis et al., 2019) with its norms after each residual, and mBART's (Liu et al., 2020), before.

Florence-2's is BART's, without a bias of the output head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.base import AttentionContext, CheckpointLayout, DecoderModel, split_key_value
from engine.models.checkpoint_index import has_tensor
from engine.models.config import is_tied
from engine.models.layers import Linear, activation
from engine.state.spec import DecoderSpec

POSITION_OFFSET = 2
"""Rows of the position table before that of position 0: a padding row and the one after it, never used."""

_LAYOUT = CheckpointLayout(
    prefixes={
        "model.decoder.": "",
        "decoder.": "",
        "model.language_model.decoder.": "",  # of Florence-2
        **{
            f"{prefix}{name}.": "embed_tokens."
            for prefix in ("", "model.", "model.language_model.")
            for name in ("shared", "encoder.embed_tokens")
        },
        "lm_head.": "lm_head.",
        "final_logits_bias": "final_logits_bias",
    },
    ignored=("decoder.version",),  # written by the first converters
)
_CHECKPOINT_PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_out_proj": ("self_attn.out_proj",),
    "cross_q_proj": ("encoder_attn.q_proj",),
    "cross_kv_proj": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_out_proj": ("encoder_attn.out_proj",),
}


class LayeredDecoder(DecoderModel):
    """The frame of BART's and Whisper's decoders: learned positions, and `layers` with cross-attention to the encoder.

    With `pre_norm` each block is normed before it instead of after its residual, and the last one after it. Raises
    ValueError for an unsupported activation.
    """

    parts = _CHECKPOINT_PARTS

    def __init__(self, info: ModelInfo, layout: CheckpointLayout, num_positions: int, *, pre_norm: bool) -> None:
        super().__init__()
        config = info.text_config
        hidden_size, num_heads, vocab_size = config["d_model"], config["decoder_attention_heads"], config["vocab_size"]
        self.spec = DecoderSpec(
            num_layers=config["decoder_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_model_len=info.max_model_len,
            num_cross_layers=config["decoder_layers"],
        )
        self.layout = layout
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_positions = nn.Embedding(num_positions, hidden_size)
        act = config.get("activation_function", "gelu")
        self.layers = nn.ModuleList(
            BartLayer(self.spec, config["decoder_ffn_dim"], act, index, pre_norm=pre_norm)
            for index in range(self.spec.num_layers)
        )
        self.layer_norm = nn.LayerNorm(hidden_size) if pre_norm else None
        self.lm_head = None if is_tied(info, default=True) else Linear(hidden_size, vocab_size, bias=False)

    def run_layers(self, hidden: Tensor, attention: AttentionContext) -> Tensor:
        """Run all layers and the last norm: [num_tokens, hidden_size] -> the same shape."""
        for layer in self.layers:
            hidden = layer(hidden, attention)
        output: Tensor = hidden if self.layer_norm is None else self.layer_norm(hidden)
        return output

    def project_cross(self, layer: int, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.layers[layer].get_submodule("cross_kv_proj")(encoder_output)
        return split_key_value(projected, self.spec)


class BartDecoder(LayeredDecoder):
    """Positions are added in `forward`, with a norm over the sum; mBART norms before each block."""

    def __init__(self, info: ModelInfo) -> None:
        num_positions = info.text_config["max_position_embeddings"] + POSITION_OFFSET
        super().__init__(info, _LAYOUT, num_positions, pre_norm=info.family.name == "mbart")
        self.scale = math.sqrt(self.spec.hidden_size) if info.text_config.get("scale_embedding") else 1.0
        self.layernorm_embedding = nn.LayerNorm(self.spec.hidden_size)
        has_bias = has_tensor(info.folder, "final_logits_bias", default=True)
        self.final_logits_bias = nn.Parameter(torch.empty(1, self.spec.vocab_size)) if has_bias else None

    def embed(self, input_ids: Tensor) -> Tensor:
        embeddings = super().embed(input_ids)
        return embeddings if self.scale == 1.0 else embeddings.mul_(self.scale)

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        hidden = embeddings + F.embedding(positions + POSITION_OFFSET, self.embed_positions.weight)
        return self.run_layers(self.layernorm_embedding(hidden), attention)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.final_logits_bias is None else logits.add_(self.final_logits_bias)


class BartLayer(nn.Module):
    """Self-attention, cross-attention and MLP, each beside a residual and with a norm before or after it."""

    def __init__(self, spec: DecoderSpec, ffn_dim: int, act: str, index: int, *, pre_norm: bool) -> None:
        super().__init__()
        self.index, self.pre_norm, self.act = index, pre_norm, activation(act)
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
        blocks = (
            (self.self_attn_layer_norm, self._attend_self),
            (self.encoder_attn_layer_norm, self._attend_cross),
            (self.final_layer_norm, self._mlp),
        )
        for norm, block in blocks:
            # A block's output is fresh memory; `hidden` may be the caller's.
            if self.pre_norm:
                hidden = block(norm(hidden), attention).add_(hidden)
            else:
                hidden = norm(block(hidden, attention).add_(hidden))
        return hidden

    def _attend_self(self, hidden: Tensor, attention: AttentionContext) -> Tensor:
        qkv = self.qkv_proj(hidden).view(len(hidden), 3, *self.heads)
        attended = attention.self_attention(self.index, *qkv.unbind(1))
        output: Tensor = self.self_out_proj(attended.reshape(len(hidden), -1))
        return output

    def _attend_cross(self, hidden: Tensor, attention: AttentionContext) -> Tensor:
        query = self.cross_q_proj(hidden).view(len(hidden), *self.heads)
        attended = attention.cross_attention(self.index, query)
        output: Tensor = self.cross_out_proj(attended.reshape(len(hidden), -1))
        return output

    def _mlp(self, hidden: Tensor, _: AttentionContext) -> Tensor:
        output: Tensor = self.fc2(self.act(self.fc1(hidden)))
        return output
