"""Whisper's encoder: transformers' own module, fed with the audio of many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers.models.whisper.modeling_whisper import WhisperEncoder as WhisperEncoderModule

from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class WhisperEncoder(EncoderModel):
    """Audio, each item padded to a window, stacked."""

    layout = CheckpointLayout(prefixes={"model.encoder.": "", "encoder.": ""})

    def __init__(self, config: Any) -> None:
        self.module = self.unmasked = WhisperEncoderModule(config)

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        output = self.module(self.send(np.stack([item.arrays["input_features"] for item in items])))
        return list(output.last_hidden_state.unbind(0))
