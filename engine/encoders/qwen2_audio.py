"""Qwen2-Audio's audio tower and projector: transformers' own modules, fed with the clips of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder as Qwen2AudioTower
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

from engine.counters import encoder_computations
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class Qwen2AudioEncoder(EncoderModel):
    """Clips, each padded to one window; the padding is masked, and only the rows of the clip itself come out."""

    layout = CheckpointLayout(
        prefixes={
            "audio_tower.": "audio_tower.",
            "model.audio_tower.": "audio_tower.",
            "multi_modal_projector.": "projector.",
            "model.multi_modal_projector.": "projector.",
        }
    )

    def __init__(self, config: Any) -> None:
        self._config = config.audio_config
        self.module: nn.Module = nn.ModuleDict(
            {"audio_tower": Qwen2AudioTower(self._config), "projector": Qwen2AudioMultiModalProjector(config)}
        )

    def finish_loading(self, device: torch.device) -> None:
        pass

    @torch.inference_mode()
    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        encoder_computations.add(len(items))
        tower, projector = self.module.get_submodule("audio_tower"), self.module.get_submodule("projector")
        weight = next(self.module.parameters())
        features = torch.from_numpy(np.stack([item.arrays["input_features"] for item in items]))
        num_frames = np.array([item.arrays["feature_attention_mask"].sum() for item in items])
        mask = self._mask(num_frames, weight)
        rows = projector(tower(features.to(weight.device, weight.dtype), attention_mask=mask).last_hidden_state)
        return [clip[: item.shape[0]].clone() for clip, item in zip(rows, items, strict=True)]

    def _mask(self, num_frames: Any, weight: Tensor) -> Tensor | None:
        """Keys that are of the clip, of each clip: the second convolution makes one of every two frames."""
        num_keys = torch.from_numpy((num_frames - 1) // 2 + 1).to(weight.device)
        window = self._config.max_source_positions
        mask = torch.arange(window, device=weight.device) < num_keys[:, None]
        like = torch.empty(len(num_keys), window, 1, dtype=weight.dtype, device=weight.device)
        attention_mask: Tensor | None = create_bidirectional_mask(self._config, like, mask.long())
        return attention_mask
