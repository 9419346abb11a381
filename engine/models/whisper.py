"""Whisper's decoder (Radford et al., 2022): pre-norm, learned positions, cross-attention to the encoder's frames."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.model_info import ModelInfo
from engine.models.bart import LayeredDecoder
from engine.models.base import AttentionContext, CheckpointLayout, Sources, Zeros

_LAYOUT = CheckpointLayout(prefixes={"model.decoder.": "", "decoder.": "", "proj_out.": "lm_head."})


class WhisperDecoder(LayeredDecoder):
    """Positions count from 0 and are added inside `forward`."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info, _LAYOUT, info.config["max_target_positions"], pre_norm=True)

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        return self.run_layers(embeddings + F.embedding(positions, self.embed_positions.weight), attention)

    def sources(self) -> Sources:
        sources = super().sources()
        for name, parts in sources.items():
            if name.endswith(".bias"):  # Whisper's keys have none
                no_bias = Zeros(self.spec.hidden_size)
                sources[name] = tuple(no_bias if str(part).endswith("k_proj.bias") else part for part in parts)
        return sources
