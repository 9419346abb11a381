"""T5's decoder (Raffel et al., 2019), and the decoder of T5 v1.1 and Flan-T5 (Chung et al., 2022): positions are a
learned bias on unscaled attention scores, and norms neither shift nor subtract the mean."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.base import AttentionContext, CheckpointLayout, DecoderModel, Sources, split_key_value
from engine.models.checkpoint_index import has_tensor
from engine.models.layers import Linear, RMSNorm, activation
from engine.state.bias import AttentionBias
from engine.state.request import Request
from engine.state.spec import DecoderSpec

DECODER_LAYOUT = CheckpointLayout(
    prefixes={
        "decoder.": "",
        "shared.": "embed_tokens.",
        "encoder.embed_tokens.": "embed_tokens.",
        "lm_head.": "lm_head.",
    },
    ignored=("EncDecAttention.relative_attention_bias.weight",),  # in old checkpoints, and never used
)
_BIAS_SOURCE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_CHECKPOINT_PARTS = {
    "self_norm": ("layer.0.layer_norm",),
    "qkv_proj": ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    "self_out_proj": ("layer.0.SelfAttention.o",),
    "cross_norm": ("layer.1.layer_norm",),
    "cross_q_proj": ("layer.1.EncDecAttention.q",),
    "cross_kv_proj": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "cross_out_proj": ("layer.1.EncDecAttention.o",),
    "mlp_norm": ("layer.2.layer_norm",),
    "wi": ("layer.2.DenseReluDense.wi",),
    "wi_gated": ("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"),
    "wo": ("layer.2.DenseReluDense.wo",),
}


class T5Decoder(DecoderModel):
    """A pre-norm decoder without biases in linear layers; `positions` count through the attention context alone.

    The original scales what goes into its output head by 1 / sqrt(d_model), v1.1 and its descendants do not. A
    checkpoint without an output head is tied, whatever config.json says. Raises ValueError for an unsupported
    activation.
    """

    parts = _CHECKPOINT_PARTS

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        config = info.config
        hidden_size, vocab_size, eps = config["d_model"], config["vocab_size"], config.get("layer_norm_epsilon", 1e-6)
        num_layers = config.get("num_decoder_layers") or config["num_layers"]
        self.spec = DecoderSpec(
            num_layers=num_layers,
            num_heads=config["num_heads"],
            num_kv_heads=config["num_heads"],
            head_dim=config["d_kv"],
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_model_len=info.max_model_len,
            num_cross_layers=num_layers,
            biased=("self",),
        )
        self.layout = DECODER_LAYOUT
        self.scales_output = bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.relative_bias = RelativeBias(
            self.spec.num_heads,
            config.get("relative_attention_num_buckets", 32),
            config.get("relative_attention_max_distance", 128),
        )
        projection = config.get("feed_forward_proj", "relu")
        self.block = nn.ModuleList(
            T5Layer(self.spec, config["d_ff"], projection, eps, index) for index in range(num_layers)
        )
        self.final_layer_norm = RMSNorm(hidden_size, eps)
        tied = config.get("tie_word_embeddings", True) or not has_tensor(info.folder, "lm_head.weight", default=True)
        self.lm_head = None if tied else Linear(hidden_size, vocab_size, bias=False)

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        hidden = embeddings
        for layer in self.block:
            hidden = layer(hidden, attention, self.relative_bias)
        normed: Tensor = self.final_layer_norm(hidden)
        return normed * self.spec.hidden_size**-0.5 if self.scales_output else normed

    def project_cross(self, layer: int, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.block[layer].get_submodule("cross_kv_proj")(encoder_output)
        return split_key_value(projected, self.spec)

    def sources(self) -> Sources:
        sources = super().sources()
        sources["relative_bias.weight"] = (_BIAS_SOURCE,)
        return sources


class RelativeBias(nn.Module, AttentionBias):
    """The bias of each head by how far back a key is (Raffel et al., 2019, section 2.1).

    Half of the buckets are single distances, the others grow logarithmically up to `max_distance` tokens, and the
    last one holds everything beyond. All layers share it.
    """

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        with torch.device("cpu"):  # also while the model around it is built without memory
            self._bucket_of = bucket_of_distance(num_buckets, max_distance)

    def values(self, queries: Tensor, keys: Tensor, request: Request | None) -> Tensor:
        if self._bucket_of.device != queries.device:
            self._bucket_of = self._bucket_of.to(queries.device)
        distances = queries[:, None] - keys[None]
        buckets = self._bucket_of[distances.clamp_(0, len(self._bucket_of) - 1)]
        return F.embedding(buckets, self.weight).permute(2, 0, 1)


def bucket_of_distance(num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance from 0 to where the last bucket begins for good, int64."""
    num_exact = num_buckets // 2
    distances = torch.arange(max(max_distance, num_exact) + 1)
    # In float32, as the models were trained: a distance at the edge of two buckets must fall into the same one.
    octaves = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    logarithmic = num_exact + (octaves * (num_buckets - num_exact)).long()
    return torch.where(distances < num_exact, distances, logarithmic.clamp(max=num_buckets - 1))


class T5Layer(nn.Module):
    """Self-attention, cross-attention and MLP, each behind a norm and beside a residual.

    `projection` is the configuration's name of the MLP: an activation, or `gated-` and an activation.
    """

    def __init__(self, spec: DecoderSpec, ffn_dim: int, projection: str, eps: float, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads = (spec.num_heads, spec.head_dim)
        size, inner = spec.hidden_size, spec.num_heads * spec.head_dim
        is_gated, name = projection.startswith("gated-"), projection.removeprefix("gated-")
        self.act = activation("gelu_new" if projection == "gated-gelu" else name)  # what the name has always meant
        self.self_norm = RMSNorm(size, eps)
        self.qkv_proj = Linear(size, 3 * inner, bias=False)
        self.self_out_proj = Linear(inner, size, bias=False)
        self.cross_norm = RMSNorm(size, eps)
        self.cross_q_proj = Linear(size, inner, bias=False)
        self.cross_kv_proj = Linear(size, 2 * inner, bias=False)
        self.cross_out_proj = Linear(inner, size, bias=False)
        self.mlp_norm = RMSNorm(size, eps)
        self.wi = None if is_gated else Linear(size, ffn_dim, bias=False)
        self.wi_gated = Linear(size, 2 * ffn_dim, bias=False) if is_gated else None
        self.wo = Linear(ffn_dim, size, bias=False)

    def forward(self, hidden: Tensor, attention: AttentionContext, bias: AttentionBias) -> Tensor:
        num_tokens = len(hidden)
        qkv = self.qkv_proj(self.self_norm(hidden)).view(num_tokens, 3, *self.heads)
        attended = attention.self_attention(self.index, *qkv.unbind(1), scale=1.0, bias=bias)
        hidden = self.self_out_proj(attended.reshape(num_tokens, -1)).add_(hidden)
        query = self.cross_q_proj(self.cross_norm(hidden)).view(num_tokens, *self.heads)
        attended = attention.cross_attention(self.index, query, scale=1.0)
        hidden = self.cross_out_proj(attended.reshape(num_tokens, -1)).add_(hidden)
        return self._mlp(self.mlp_norm(hidden)).add_(hidden)

    def _mlp(self, normed: Tensor) -> Tensor:
        if self.wi_gated is not None:
            gate, up = self.wi_gated(normed).chunk(2, dim=-1)
            inner = self.act(gate).mul_(up)
        else:
            assert self.wi is not None
            inner = self.act(self.wi(normed))
        output: Tensor = self.wo(inner)
        return output
