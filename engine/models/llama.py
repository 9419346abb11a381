"""Llama, Mistral, Qwen2, Qwen3 and the text decoder of Qwen2.5-VL: a shared architecture, with and without biases,
norms of queries and keys, and M-RoPE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.base import AttentionContext, CheckpointLayout, DecoderModel
from engine.models.config import TextConfig, read_text_config
from engine.models.layers import Linear, RMSNorm, Rotary, rotate, silu_mul
from engine.state.spec import DecoderSpec

_NESTED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
"""Decoders of this architecture. Granite's tensors have the same names, but it scales what these do not."""
LLAMA_LAYOUT = CheckpointLayout(
    prefixes={"model.": "", "lm_head.": "lm_head."},
    ignored=("rotary_emb.inv_freq",),
)
MULTIMODAL_LAYOUT = CheckpointLayout(
    prefixes={
        "model.language_model.": "",
        "language_model.model.": "",
        "language_model.model.model.": "",  # Qwen2-Audio, saved by transformers 5.17 to 5.22
        "model.text_model.": "",
        "model.": "",
        "lm_head.": "lm_head.",
        "language_model.lm_head.": "lm_head.",
    },
    others=(
        "model.visual.",
        "model.vision_tower.",
        "model.vision_model.",
        "model.audio_tower.",
        "model.multi_modal_projector.",
        "model.connector.",
        "model.image_newline",
    ),
    ignored=("rotary_emb.inv_freq",),
)
CHECKPOINT_PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


def build(info: ModelInfo) -> LlamaDecoder:
    """Make the decoder of a model folder. Raises ValueError for an unsupported configuration."""
    kind = (info.config.get("text_config") or {}).get("model_type")
    if kind is not None and kind not in _NESTED_TYPES:
        raise ValueError(f"text_config.model_type {kind!r} is not supported; supported: {', '.join(_NESTED_TYPES)}")
    return LlamaDecoder(info)


class LlamaDecoder(DecoderModel):
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

    Linear layers that read the same input are fused.
    """

    parts = CHECKPOINT_PARTS

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        self.config = config = read_text_config(info)
        self.spec = DecoderSpec(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            mrope_section=config.mrope_section,
            max_model_len=info.max_model_len,
            windows=tuple(dict.fromkeys(config.windows)),
        )
        self.layout = MULTIMODAL_LAYOUT if info.media_kind else LLAMA_LAYOUT
        self.rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, index) for index in range(config.num_layers))
        self.norm: nn.Module = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tied else Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        rotation = self.rotary(positions, embeddings.dtype)
        hidden, residual = embeddings, None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, attention)
        normed: Tensor = self.norm(hidden, residual)
        return normed


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual.

    Between layers, hidden states are the sum of two tensors that the next norm adds up in passing: the output of the
    MLP and the residual beside it, None for no residual.
    """

    def __init__(self, config: TextConfig, index: int) -> None:
        super().__init__()
        self.index, self.is_last = index, index == config.num_layers - 1
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.window = config.windows[index]
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.qkv_proj = Linear(hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None
        self.o_proj = Linear(config.num_heads * config.head_dim, hidden_size, bias=config.o_bias)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.gate_up_proj = Linear(hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, hidden_size, bias=config.mlp_bias)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: tuple[Tensor, Tensor], attention: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        # The sums reuse the fresh output of a projection; without a residual, `hidden` may be the caller's embeddings.
        num_tokens, (num_heads, num_kv_heads, _) = len(hidden), self.heads
        qkv = self.qkv_proj(self.input_layernorm(hidden, residual)).view(num_tokens, sum(self.heads), self.head_dim)
        query_key = qkv[:, : num_heads + num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            query_key = torch.cat((self.q_norm(qkv[:, :num_heads]), self.k_norm(query_key[:, num_heads:])), dim=1)
        query_key = rotate(query_key, *rotation)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        value = qkv[:, num_heads + num_kv_heads :]
        attended = attention.self_attention(self.index, query, key, value, window=self.window)
        if self.is_last:
            attended, hidden = attention.select_read(attended), attention.select_read(hidden)
        output: Tensor = self.o_proj(attended.reshape(len(attended), -1))
        normed = self.post_attention_layernorm(output, hidden)
        return self.down_proj(silu_mul(self.gate_up_proj(normed))), output
