"""Qwen2-Audio's audio tower and projector: transformers' own modules, fed with the audio of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder as Qwen2AudioTower
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

from engine.device.h2d import send_tensor
from engine.encoders.attention import rows_and_padding
from engine.models.base import CheckpointLayout, EncoderModel, with_and_without_model
from engine.processors import ProcessedInput


class Qwen2AudioEncoder(EncoderModel):
    """Audio, stacked to the longest item.

    transformers runs the whole window (30 s) and masks what is behind the audio. Masked rows are read by nobody and
    dropped at the end: here they are not computed, which for 3 s of audio is nine tenths of the work.
    """

    layout = CheckpointLayout(
        with_and_without_model({"audio_tower.": "audio_tower.", "multi_modal_projector.": "projector."})
    )

    def __init__(self, config: Any) -> None:
        self._tower: Any = Qwen2AudioTower(config.audio_config)
        self._projector = Qwen2AudioMultiModalProjector(config)
        self.padded = self._tower
        self.module: nn.Module = nn.ModuleDict({"audio_tower": self._tower, "projector": self._projector})

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        num_frames = np.array([item.arrays["feature_attention_mask"].sum() for item in items])
        num_keys = torch.from_numpy((num_frames - 1) // 2 + 1)  # the second convolution makes one of every two frames
        needed = 2 * int(num_keys.max()) + 1  # key j is made of frames 2j - 2 to 2j + 2, be they silence
        features = self.send(np.stack([item.arrays["input_features"][:, :needed] for item in items]))
        rows = self._projector(self._hear(features, num_keys))
        return [row[: item.shape[0]] for row, item in zip(rows, items, strict=True)]

    def _hear(self, features: Tensor, num_keys: Tensor) -> Tensor:
        """The tower's forward pass: [n, mels, frames] -> [n, longest / 2, d_model]."""
        tower, longest = self._tower, int(num_keys.max())
        hidden = F.gelu(tower.conv2(F.gelu(tower.conv1(features)))).transpose(1, 2)
        hidden = hidden[:, :longest] + tower.embed_positions.weight[:longest]
        of_the_clip = send_tensor(torch.arange(longest) < num_keys[:, None], features.device, torch.long)
        mask = create_bidirectional_mask(tower.config, hidden, of_the_clip)
        told = rows_and_padding(tower, num_keys.tolist(), longest)
        for layer in tower.layers:
            hidden = layer(hidden, mask, **told)
        normed: Tensor = tower.layer_norm(tower.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2))
        return normed
