"""Llama, Qwen2 and the text decoder of Qwen2.5-VL: one architecture, with and without biases and M-RoPE."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.base import AttentionContext, CheckpointLayout, DecoderModel, DecoderSpec, Sources
from engine.models.rotary import Rotary, rotate

LLAMA_LAYOUT = CheckpointLayout(
    prefixes={"model.": "", "lm_head.": "lm_head."},
    ignored=("rotary_emb.inv_freq",),
)
QWEN2_5_VL_LAYOUT = CheckpointLayout(
    prefixes={
        "model.language_model.": "",
        "language_model.model.": "",
        "model.": "",
        "lm_head.": "lm_head.",
        "language_model.lm_head.": "lm_head.",
    },
    others=("model.visual.",),
    ignored=("rotary_emb.inv_freq",),
)
_CHECKPOINT_PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


class LlamaDecoder(DecoderModel):
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

    `config` is transformers' configuration of the text model. Linear layers that read the same input are fused.
    Raises ValueError for what this file does not compute: sliding windows, other activations, partial rotation.
    """

    def __init__(self, config: Any, *, max_model_len: int, tied: bool, layout: CheckpointLayout) -> None:
        super().__init__()
        _check_supported(config, max_model_len)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        section = config.rope_parameters.get("mrope_section")
        self.spec = DecoderSpec(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            has_cross_attention=False,
            mrope_section=None if section is None else (section[0], section[1], section[2]),
            max_model_len=max_model_len,
        )
        self.layout = layout
        self.tied = tied
        self.rotary = Rotary(config, head_dim)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, self.spec, index) for index in range(self.spec.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embed_tokens.weight)

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        rotation = self.rotary(positions, embeddings.dtype)
        hidden = embeddings
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight)

    def sources(self) -> Sources:
        sources: Sources = {}
        for name, _ in self.named_parameters():
            leaf = name.split(".")[-2]
            sources[name] = tuple(name.replace(leaf, part) for part in _CHECKPOINT_PARTS.get(leaf, (leaf,)))
        return sources


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: Any, spec: DecoderSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.head_dim = spec.head_dim
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        qkv_bias, o_bias, mlp_bias = _biases(config)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.qkv_proj = nn.Linear(hidden_size, sum(self.heads) * spec.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, hidden_size, bias=o_bias)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * config.intermediate_size, bias=mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, hidden_size, bias=mlp_bias)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionContext) -> Tensor:
        # The sums reuse the fresh output of a projection; `hidden` itself may be the caller's embeddings.
        hidden = self._attend(self.input_layernorm(hidden), rotation, attention).add_(hidden)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate).mul_(up))
        return output.add_(hidden)

    def _attend(self, normed: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionContext) -> Tensor:
        num_tokens, (num_heads, num_kv_heads, _) = len(normed), self.heads
        qkv = self.qkv_proj(normed).view(num_tokens, sum(self.heads), self.head_dim)
        query_key = rotate(qkv[:, : num_heads + num_kv_heads], *rotation)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        attended = attention.self_attention(self.index, query, key, qkv[:, num_heads + num_kv_heads :])
        output: Tensor = self.o_proj(attended.reshape(num_tokens, -1))
        return output


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), summed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def _biases(config: Any) -> tuple[bool, bool, bool]:
    """Whether the projections to q/k/v, from attention, and of the MLP have biases."""
    if config.model_type == "llama":
        return config.attention_bias, config.attention_bias, config.mlp_bias
    return True, False, False


def _check_supported(config: Any, max_model_len: int) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"activation {config.hidden_act!r} is not supported; supported: silu")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if sliding and window is not None and window < max_model_len:
        raise ValueError(f"sliding-window attention over {window} of {max_model_len} tokens is not supported")
