"""transformers' own greedy `generate`, one request at a time, in fp32 on the CPU: what everything else must equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    Qwen2AudioForConditionalGeneration,
    Qwen3ASRForConditionalGeneration,
)
from transformers.utils import logging

from common.model_info import load_model_info
from engine.processors.qwen3_asr import num_output_tokens
from tests.equality import processors

SAMPLE_RATE = 16_000
_LOADERS = {
    "llama": AutoModelForCausalLM,
    "qwen2": AutoModelForCausalLM,
    "qwen3": AutoModelForCausalLM,
    "mistral": AutoModelForCausalLM,
    "gemma3_text": AutoModelForCausalLM,
    "gemma3": AutoModelForImageTextToText,
    "qwen2_5_vl": AutoModelForImageTextToText,
    "qwen2_vl": AutoModelForImageTextToText,
    "qwen3_vl": AutoModelForImageTextToText,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "qwen3_asr": Qwen3ASRForConditionalGeneration,
    "llava": AutoModelForImageTextToText,
    "llava_next": AutoModelForImageTextToText,
    "mllama": AutoModelForImageTextToText,
    "idefics3": AutoModelForImageTextToText,
    "smolvlm": AutoModelForImageTextToText,
    "florence2": AutoModelForImageTextToText,
    "whisper": AutoModelForSpeechSeq2Seq,
    "bart": AutoModelForSeq2SeqLM,
    "mbart": AutoModelForSeq2SeqLM,
    "t5": AutoModelForSeq2SeqLM,
}


class Reference:
    """A model as transformers runs it. Outputs end before the end-of-sequence token."""

    def __init__(self, folder: Path | str) -> None:
        self.info = load_model_info(str(folder))
        logging.set_verbosity_error()
        self._processor: Any = None

    @cached_property
    def model(self) -> Any:
        return _LOADERS[self.info.family.name].from_pretrained(self.info.folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], max_tokens: int, media: Sequence[Image.Image | npt.NDArray[np.float32]] = ()
    ) -> list[int]:
        """The tokens that follow a prompt with one placeholder token per picture or clip."""
        inputs = self.inputs(prompt, media)
        mask = torch.ones_like(inputs["input_ids"])
        out = self.model.generate(**inputs, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return self.strip(out[0, inputs["input_ids"].shape[1] :].tolist())

    def inputs(
        self, prompt: Sequence[int], media: Sequence[Image.Image | npt.NDArray[np.float32]] = ()
    ) -> dict[str, torch.Tensor]:
        """Of the model, for a prompt with one placeholder token per picture or clip."""
        expand = self._expand_clips if self.info.media_kind == "audio" else self._expand
        return expand(list(prompt), media) if media else {"input_ids": torch.tensor([list(prompt)])}

    @torch.inference_mode()
    def translate(self, encoder_prompt: Sequence[int], prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens that follow a decoder prompt, its start token included, over an encoder prompt."""
        ids, start = torch.tensor([list(encoder_prompt)]), torch.tensor([list(prompt)])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens, "do_sample": False}
        out = self.model.generate(ids, decoder_input_ids=start, **options)
        return self.strip(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def describe(
        self, picture: Image.Image, text: str, prompt: Sequence[int], max_tokens: int
    ) -> tuple[list[int], list[int]]:
        """The tokens that follow a decoder prompt over a picture and a text (Florence-2).

        The encoder's prompt comes first, with one placeholder; the checkpoint's rules of generation hold.
        """
        self._processor = self._processor or processors.make_processor(self.info)
        inputs = self._processor(images=picture, text=text, return_tensors="pt")
        start = torch.tensor([list(prompt)])
        out = self.model.generate(**inputs, decoder_input_ids=start, max_new_tokens=max_tokens, do_sample=False)
        ids = inputs["input_ids"][0].tolist()
        return ids[ids.count(self.info.placeholder_token_id) - 1 :], self.strip(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def transcribe(self, samples: npt.NDArray[np.float32], max_tokens: int, **options: Any) -> list[int]:
        """The tokens of one clip of at most 30 s; `options` are Whisper's `language` and `task`."""
        if self._processor is None:
            self._processor = AutoFeatureExtractor.from_pretrained(self.info.folder)
        features = self._processor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        return self.strip(
            self.model.generate(features, do_sample=False, max_new_tokens=max_tokens, **options)[0].tolist()
        )

    def _expand(self, prompt: list[int], images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Put as many placeholders as the picture has tokens where the prompt has one."""
        if self.info.family.name in processors.FAMILIES:
            self._processor = self._processor or processors.make_processor(self.info)
            return processors.expand(self._processor, self.info, prompt, images)
        if self._processor is None:
            self._processor = processors.image_processor(self.info.folder)
        pixels = self._processor(images=list(images), return_tensors="pt")
        if self.info.family.name == "gemma3":
            input_ids = self._repeat(prompt, [self.info.config["mm_tokens_per_image"]] * len(images))
            is_image = input_ids.eq(self.info.placeholder_token_id or 0).long()
            return {"pixel_values": pixels["pixel_values"], "input_ids": input_ids, "token_type_ids": is_image}
        merged = self._processor.merge_size**2
        input_ids = self._repeat(prompt, (pixels["image_grid_thw"].prod(-1) // merged).tolist())
        kinds = input_ids.eq(self.info.placeholder_token_id or 0).long()
        return {**pixels, "input_ids": input_ids, "mm_token_type_ids": kinds}

    def _expand_clips(self, prompt: list[int], clips: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The same for Qwen2-Audio; its tower tells how many rows it makes of a clip."""
        if self._processor is None:
            self._processor = AutoFeatureExtractor.from_pretrained(self.info.folder)
        if self.info.family.name == "qwen3_asr":
            return self._expand_long_clips(prompt, clips)
        features = self._processor(
            list(clips), sampling_rate=SAMPLE_RATE, return_attention_mask=True, return_tensors="pt"
        )
        mask = features.attention_mask
        _, counts = self.model.model.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
        return {
            "input_features": features.input_features,
            "feature_attention_mask": mask,
            "input_ids": self._repeat(prompt, counts.tolist()),
        }

    def _expand_long_clips(self, prompt: list[int], clips: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The same for Qwen3-ASR: spectrograms of each clip alone, then padded to the longest."""
        options = {"padding": "longest", "return_attention_mask": True, "return_tensors": "np"}
        each = [self._processor(clip, sampling_rate=SAMPLE_RATE, **options) for clip in clips]
        size = max(one["attention_mask"].shape[1] for one in each)
        features, mask = (
            np.concatenate([np.pad(one[name], (*pads, (0, size - one[name].shape[-1]))) for one in each])
            for name, pads in (("input_features", ((0, 0), (0, 0))), ("attention_mask", ((0, 0),)))
        )
        counts = [num_output_tokens(int(count)) for count in mask.sum(-1)]
        inputs = {"input_features": torch.from_numpy(features), "input_features_mask": torch.from_numpy(mask)}
        return {**inputs, "input_ids": self._repeat(prompt, counts)}

    def _repeat(self, prompt: list[int], counts: Sequence[int]) -> torch.Tensor:
        """[1, num_tokens]: each placeholder as often as its item has rows."""
        remaining, placeholder = iter(counts), self.info.placeholder_token_id
        return torch.tensor(
            [[token for token in prompt for _ in range(next(remaining) if token == placeholder else 1)]]
        )

    def strip(self, tokens: list[int]) -> list[int]:
        """Without the end-of-sequence token and what pads the row after it."""
        ends = self.info.eos_token_ids
        return tokens[: next((index for index, token in enumerate(tokens) if token in ends), len(tokens))]
