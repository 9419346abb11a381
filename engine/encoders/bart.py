"""The encoders of BART and mBART: transformers' own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartEncoder as BartEncoderModule
from transformers.models.mbart.modeling_mbart import MBartEncoder as MBartEncoderModule

from engine.encoders.padded import encode_texts
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class BartEncoder(EncoderModel):
    """Token ids of BART's encoder prompts, padded where they share a batch."""

    layout = CheckpointLayout(
        prefixes={
            "model.encoder.": "",
            "encoder.": "",
            "model.shared.": "embed_tokens.",
            "shared.": "embed_tokens.",
        },
        ignored=("encoder.version",),  # written by the first converters
    )

    def __init__(self, config: Any) -> None:
        self.module: nn.Module = self.make_module(config)

    def make_module(self, config: Any) -> nn.Module:
        """transformers' encoder, without weights."""
        module: nn.Module = BartEncoderModule(config)
        return module

    def finish_loading(self, device: torch.device) -> None:
        pass

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        return encode_texts(self.module, items)


class MBartEncoder(BartEncoder):
    """The same for mBART."""

    def make_module(self, config: Any) -> nn.Module:
        module: nn.Module = MBartEncoderModule(config)
        return module
