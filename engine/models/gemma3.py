"""Gemma 3's decoder (Gemma Team, 2025): norms before and behind attention and MLP, five layers with a window for each
without one, and two rotary bases. The tokens of an image see each other in both directions."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.base import AttentionContext
from engine.models.config import TextConfig, sliding_layers
from engine.models.layers import Linear, Rotary, activation, rotate
from engine.models.llama import LlamaDecoder

_LOCAL_THETA = 10_000.0
_NOT_COMPUTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3Decoder(LlamaDecoder):
    """A decoder with grouped-query attention, norms of queries and keys, and a gated MLP between two norms each.

    Token embeddings are scaled by sqrt(hidden_size); encoder outputs, which replace some, are not.
    """

    def __init__(self, info: ModelInfo) -> None:
        """Raises ValueError for an unsupported configuration."""
        for name in _NOT_COMPUTED:
            if info.text_config.get(name):
                raise ValueError(f"{name} is not supported")
        super().__init__(info)
        config, json = self.config, info.text_config
        whole_input_tokens = int(info.config.get("mm_tokens_per_image") or 256) if info.media_kind else 0
        self.spec = replace(self.spec, whole_input_tokens=whole_input_tokens)
        given = (json.get("rope_parameters") or {}).get("sliding_attention") or {}
        theta = float(given.get("rope_theta") or json.get("rope_local_base_freq") or _LOCAL_THETA)
        self.local_rotary = Rotary(replace(config, rope={"rope_type": "default", **given, "rope_theta": theta}))
        act, scale = str(json.get("hidden_activation")), float(json["query_pre_attn_scalar"]) ** -0.5
        self.layers = nn.ModuleList(
            Gemma3Layer(config, index, act, scale, is_local=is_local)
            for index, is_local in enumerate(sliding_layers(json, "gemma3"))
        )
        self.norm = Gemma3Norm(config.hidden_size, config.rms_norm_eps)

    def embed(self, input_ids: Tensor) -> Tensor:
        embeddings = super().embed(input_ids)
        # The factor is rounded to the weights' dtype, as the models were trained.
        return embeddings.mul_(float(torch.tensor(self.spec.hidden_size**0.5, dtype=embeddings.dtype)))

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        whole, local = (rotary(positions, embeddings.dtype) for rotary in (self.rotary, self.local_rotary))
        hidden = embeddings
        for layer in self.layers:
            hidden = layer(hidden, local if layer.is_local else whole, attention)
        normed: Tensor = self.norm(hidden)
        return normed


class Gemma3Norm(nn.Module):
    """A root-mean-square norm that multiplies by 1 + weight, in float32 (bfloat16 would round the sum)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> the same."""
        return F.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(hidden.dtype)


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms and beside a residual. `is_local` layers turn by the local base."""

    def __init__(self, config: TextConfig, index: int, act: str, scale: float, *, is_local: bool) -> None:
        super().__init__()
        self.is_last = index == config.num_layers - 1
        self.index, self.scale, self.is_local = index, scale, is_local
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.window = config.windows[index]
        self.act = activation(act)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Gemma3Norm(size, eps)
        self.qkv_proj = Linear(size, sum(self.heads) * config.head_dim, bias=config.qkv_bias)
        self.q_norm = Gemma3Norm(config.head_dim, eps)
        self.k_norm = Gemma3Norm(config.head_dim, eps)
        self.o_proj = Linear(config.num_heads * config.head_dim, size, bias=config.o_bias)
        self.post_attention_layernorm = Gemma3Norm(size, eps)
        self.pre_feedforward_layernorm = Gemma3Norm(size, eps)
        self.gate_up_proj = Linear(size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, size, bias=False)
        self.post_feedforward_layernorm = Gemma3Norm(size, eps)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionContext) -> Tensor:
        num_tokens = len(hidden)
        qkv = self.qkv_proj(self.input_layernorm(hidden)).view(num_tokens, sum(self.heads), self.head_dim)
        query, key, value = qkv.split(self.heads, dim=1)
        query, key = rotate(self.q_norm(query), *rotation), rotate(self.k_norm(key), *rotation)
        attended = attention.self_attention(self.index, query, key, value, scale=self.scale, window=self.window)
        if self.is_last:
            attended, hidden = attention.select_read(attended), attention.select_read(hidden)
        output = self.o_proj(attended.reshape(len(attended), -1))
        hidden = hidden + self.post_attention_layernorm(output)
        gate, up = self.gate_up_proj(self.pre_feedforward_layernorm(hidden)).chunk(2, dim=-1)
        normed: Tensor = self.post_feedforward_layernorm(self.down_proj(self.act(gate).mul_(up)))
        return hidden + normed
