"""Whisper's encoder: transformers' own module, fed with the audio of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.whisper.modeling_whisper import WhisperEncoder as WhisperEncoderModule

from engine.device.h2d import send_tensor
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class WhisperEncoder(EncoderModel):
    """Audio, each item padded to a window, stacked."""

    layout = CheckpointLayout(prefixes={"model.encoder.": "", "encoder.": ""})

    def __init__(self, config: Any) -> None:
        self.module = self.unmasked = WhisperEncoderModule(config)

    @torch.inference_mode()
    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        weight = next(self.module.parameters())
        features = torch.from_numpy(np.stack([item.arrays["input_features"] for item in items]))
        output = self.module(send_tensor(features, weight.device, weight.dtype))
        return list(output.last_hidden_state.unbind(0))
