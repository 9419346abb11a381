"""Qwen3-ASR's audio tower and projector: transformers' own modules, fed with the audio of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASREncoder as Qwen3ASRTower
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRMultiModalProjector, get_audio_cu_seqlens

from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class Qwen3ASREncoder(EncoderModel):
    """Audio of any length, laid end to end as one sequence of chunks; attention stays within windows of an item."""

    layout = CheckpointLayout(
        prefixes={"model.audio_tower.": "audio_tower.", "model.multi_modal_projector.": "projector."}
    )

    def __init__(self, config: Any) -> None:
        self._tower: Any = Qwen3ASRTower(config.audio_config)
        self.unmasked = self._tower
        self._projector = Qwen3ASRMultiModalProjector(config)
        self.module: nn.Module = nn.ModuleDict({"audio_tower": self._tower, "projector": self._projector})

    def finish_loading(self, device: torch.device) -> None:
        # Not in a checkpoint: sines of the places within a chunk.
        embedding = self._tower.positional_embedding
        with torch.device("cpu"):
            sines = embedding.compute_default_singular_positional_embedding()
        embedding.positional_embedding = sines.to(device)

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        features = self.send(np.concatenate([item.arrays["input_features"] for item in items], axis=1)[None])
        mask = torch.from_numpy(np.concatenate([item.arrays["input_features_mask"] for item in items]))[None]
        counts = torch.tensor([int(item.arrays["input_features_mask"].sum()) for item in items])
        tower, chunk = self._tower, 2 * self._tower.n_window
        # Windows of full chunks, whatever the lengths: a shorter clip lies within one.
        windows = get_audio_cu_seqlens(torch.tensor([chunk]), counts, tower.n_window_infer, tower.n_window)
        device = features.device
        hidden = tower(features, mask.to(device), cu_seqlens=windows.to(device)).last_hidden_state
        return list(self._projector(hidden).split([item.shape[0] for item in items]))
