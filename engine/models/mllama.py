"""Mllama's text decoder (Llama 3.2 Vision): Llama with gated cross-attention layers to images in between."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.base import AttentionContext, CheckpointLayout, Sources, fused_sources
from engine.models.config import TextConfig
from engine.models.layers import Linear, RMSNorm, silu_mul
from engine.models.llama import CHECKPOINT_PARTS, LlamaDecoder, LlamaLayer

EXTRA_EMBEDDINGS = 8
"""Tokens that are read but never generated, the image's placeholder first."""
_LAYOUT = CheckpointLayout(
    prefixes={
        "model.language_model.": "",
        "language_model.model.": "",
        "lm_head.": "lm_head.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=("rotary_emb.inv_freq",),
)
_CROSS_PARTS = {
    **CHECKPOINT_PARTS,  # the MLP is Llama's
    **{name: (f"cross_attn.{name}",) for name in ("q_proj", "q_norm", "k_norm", "o_proj")},
    "kv_proj": ("cross_attn.k_proj", "cross_attn.v_proj"),
}


class MllamaDecoder(LlamaDecoder):
    """Layers stand in a single list, as in the checkpoint; caches count the layers of each kind from 0."""

    def __init__(self, info: ModelInfo) -> None:
        """Raises ValueError for an unsupported configuration."""
        super().__init__(info)
        config = self.config
        cross_layers = frozenset(int(index) for index in info.text_config["cross_attention_layers"])
        outside = sorted(index for index in cross_layers if not 0 <= index < config.num_layers)
        if outside or len(cross_layers) == config.num_layers:
            raise ValueError(
                f"cross_attention_layers {sorted(cross_layers)} of {config.num_layers} layers are not supported: "
                "expected layer numbers, and not all of them"
            )
        self.layout = _LAYOUT
        self.spec = replace(
            self.spec,
            num_layers=config.num_layers - len(cross_layers),
            num_cross_layers=len(cross_layers),
            extra_embeddings=EXTRA_EMBEDDINGS,
        )
        self.embed_tokens = nn.Embedding(self.spec.num_embeddings, config.hidden_size)
        self.layers = nn.ModuleList()
        self.cross_layers: list[CrossLayer] = []
        for index in range(config.num_layers):
            if index in cross_layers:
                self.cross_layers.append(CrossLayer(config, len(self.cross_layers)))
                self.layers.append(self.cross_layers[-1])
            else:
                self.layers.append(LlamaLayer(config, index - len(self.cross_layers)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)  # never the embedding, which has more

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        rotation = self.rotary(positions, embeddings.dtype)
        hidden, residual = embeddings, None
        for layer in self.layers:
            if not isinstance(layer, CrossLayer):
                hidden, residual = layer(hidden, residual, rotation, attention)
            elif attention.has_cross:
                hidden, residual = layer(hidden if residual is None else hidden.add_(residual), attention), None
        normed: Tensor = self.norm(hidden, residual)
        return normed

    def project_cross(self, layer: int, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        return self.cross_layers[layer].project(encoder_output)

    def sources(self) -> Sources:
        crossing = tuple(f"layers.{i}." for i, layer in enumerate(self.layers) if isinstance(layer, CrossLayer))
        own, crossed = fused_sources(self, CHECKPOINT_PARTS), fused_sources(self, _CROSS_PARTS)
        return {name: (crossed if name.startswith(crossing) else own)[name] for name in own}


class CrossLayer(nn.Module):
    """Cross-attention and MLP, each behind a norm, opened by a gate and beside a residual.

    A token that no input stands before or at passes through the attention, but not through the MLP.
    """

    def __init__(self, config: TextConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads, self.kv_heads = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.q_proj = Linear(size, config.num_heads * config.head_dim, bias=False)
        self.kv_proj = Linear(size, 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps)
        self.k_norm = RMSNorm(config.head_dim, eps)
        self.o_proj = Linear(config.num_heads * config.head_dim, size, bias=False)
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1))
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.gate_up_proj = Linear(size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, size, bias=False)
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1))

    def project(self, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values: [m, hidden_size] -> 2 x [m, num_kv_heads, head_dim]."""
        key, value = self.kv_proj(encoder_output).view(len(encoder_output), 2, *self.kv_heads).unbind(1)
        return self.k_norm(key), value

    def forward(self, hidden: Tensor, attention: AttentionContext) -> Tensor:
        num_tokens = len(hidden)
        query = self.q_norm(self.q_proj(self.input_layernorm(hidden)).view(num_tokens, *self.heads))
        attended = self.o_proj(attention.cross_attention(self.index, query).reshape(num_tokens, -1))
        hidden = hidden + self.cross_attn_attn_gate.tanh() * attended
        output: Tensor = self.down_proj(silu_mul(self.gate_up_proj(self.post_attention_layernorm(hidden))))
        if attention.after_input is not None:
            output = torch.where(attention.after_input[:, None], output, 0)  # whatever it is: infinity * 0 is NaN
        return hidden + self.cross_attn_mlp_gate.tanh() * output
