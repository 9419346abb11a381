"""transformers' own greedy `generate`, one request at a time, in fp32 on the CPU: what everything else must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
)
from transformers.utils import logging

from common.model_info import load_model_info

SAMPLE_RATE = 16_000
_LOADERS = {
    "llama": AutoModelForCausalLM,
    "qwen2": AutoModelForCausalLM,
    "qwen3": AutoModelForCausalLM,
    "mistral": AutoModelForCausalLM,
    "qwen2_5_vl": AutoModelForImageTextToText,
    "whisper": AutoModelForSpeechSeq2Seq,
}


class Reference:
    """A model as transformers runs it. Outputs end before the end-of-sequence token."""

    def __init__(self, folder: Path | str) -> None:
        self.info = load_model_info(str(folder))
        logging.set_verbosity_error()
        self.model: Any = _LOADERS[self.info.family.name].from_pretrained(self.info.folder, dtype=torch.float32).eval()
        self._processor: Any = None

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int, images: Sequence[Image.Image] = ()) -> list[int]:
        """The tokens that follow a prompt with one placeholder token per picture."""
        inputs = self._expand(list(prompt), images) if images else {"input_ids": torch.tensor([list(prompt)])}
        mask = torch.ones_like(inputs["input_ids"])
        out = self.model.generate(**inputs, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return self.strip(out[0, inputs["input_ids"].shape[1] :].tolist())

    @torch.inference_mode()
    def transcribe(self, samples: npt.NDArray[np.float32], max_tokens: int, **options: Any) -> list[int]:
        """The tokens of one clip of at most 30 s; `options` are Whisper's `language` and `task`."""
        if self._processor is None:
            self._processor = AutoFeatureExtractor.from_pretrained(self.info.folder)
        features = self._processor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        return self.strip(
            self.model.generate(features, do_sample=False, max_new_tokens=max_tokens, **options)[0].tolist()
        )

    def _expand(self, prompt: list[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Put as many placeholders as the picture has tokens where the prompt has one."""
        if self._processor is None:
            self._processor = AutoImageProcessor.from_pretrained(self.info.folder, backend="pil")
        pixels = self._processor(images=list(images), return_tensors="pt")
        merged = self._processor.merge_size**2
        counts = iter((pixels["image_grid_thw"].prod(-1) // merged).tolist())
        placeholder = self.info.placeholder_token_id
        ids = [token for token in prompt for _ in range(next(counts) if token == placeholder else 1)]
        input_ids = torch.tensor([ids])
        return {**pixels, "input_ids": input_ids, "mm_token_type_ids": input_ids.eq(placeholder or 0).long()}

    def strip(self, tokens: list[int]) -> list[int]:
        """Without the end-of-sequence token and what pads the row after it."""
        ends = self.info.eos_token_ids
        return tokens[: next((index for index, token in enumerate(tokens) if token in ends), len(tokens))]
