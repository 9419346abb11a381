"""Attention over one whole sequence, without any cache: what a model's forward pass needs to be tested alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.model_info import load_model_info
from engine.models.base import DecoderModel
from engine.models.registry import load_decoder
from engine.state.bias import AttentionBias
from engine.state.inputs import EncoderRows
from engine.state.request import Request


class DenseAttention:
    """Implements AttentionContext for one sequence; `encoder_output` [m, hidden] for encoder-decoder models."""

    def __init__(
        self, model: DecoderModel, encoder_output: Tensor | None = None, request: Request | None = None
    ) -> None:
        self._request = request
        layers = range(model.spec.num_cross_layers)
        self._cross = [] if encoder_output is None else [model.project_cross(i, encoder_output) for i in layers]

        self.has_cross = encoder_output is not None
        self.after_input: Tensor | None = None
        self.encoder_rows: EncoderRows | None = None

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        bias: AttentionBias | None = None,
        window: int | None = None,
    ) -> Tensor:
        positions = torch.arange(len(query))
        mask = torch.zeros(1, len(query), len(query))
        if bias is not None:
            mask = bias.values(positions, positions, self._request)
        behind = positions[:, None] - positions[None]
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        return _attend(query, key, value, scale, mask.masked_fill(hidden, float("-inf")).to(query.dtype))

    def select_read(self, x: Tensor) -> Tensor:
        return x

    def cross_attention(
        self, layer: int, query: Tensor, *, scale: float | None = None, bias: AttentionBias | None = None
    ) -> Tensor:
        positions, rows = torch.arange(len(query)), torch.arange(len(self._cross[layer][0]))
        mask = None if bias is None else bias.values(positions, rows, self._request).to(query.dtype)
        return _attend(query, *self._cross[layer], scale, mask)


def edit_json(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def decoder_of(folder: object, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_decoder(load_model_info(str(folder)), torch.device("cpu"), dtype)[0]


@torch.inference_mode()
def logits_of(
    model: DecoderModel,
    input_ids: Tensor,
    positions: Tensor | None = None,
    encoder_output: Tensor | None = None,
    request: Request | None = None,
) -> Tensor:
    """input_ids [num_tokens] -> [num_tokens, vocab_size]"""
    positions = torch.arange(len(input_ids)) if positions is None else positions
    hidden = model(model.embed(input_ids), positions, DenseAttention(model, encoder_output, request))
    return model.logits(hidden)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)
