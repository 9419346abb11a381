"""transformers' own `generate`: one padded batch, greedy."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

import soundfile
import torch
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from common.model_info import ModelInfo
from common.text.processor import TextProcessor
from tools.bench.client import Outcome
from tools.bench.measure import in_waves
from tools.bench.workloads import SAMPLE_RATE, BenchRequest

_LOADERS = {"text": AutoModelForCausalLM, "image": AutoModelForImageTextToText, "audio": AutoModelForSpeechSeq2Seq}


class _FirstTokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when the first new tokens came: `generate` puts the prompt first, then one column per step."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: Any) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None: ...


class TransformersSystem:
    """The reference that everybody has. It computes on `device` in `dtype`."""

    name = "transformers generate"

    def __init__(self, info: ModelInfo, dtype: torch.dtype, num_threads: int, device: str = "cpu") -> None:
        logging.set_verbosity_error()
        torch.set_num_threads(num_threads)
        kind = "text" if info.media_kind is None else info.media_kind
        self.model: Any = _LOADERS[kind].from_pretrained(info.folder, dtype=dtype).to(device).eval()
        self._info, self._dtype, self._text, self._device = info, dtype, TextProcessor(info), device
        self._processor: Any = None
        if kind == "image":
            self._processor = AutoImageProcessor.from_pretrained(info.folder, backend="pil")
        elif kind == "audio":
            self._processor = AutoFeatureExtractor.from_pretrained(info.folder)

    def run(self, requests: Sequence[BenchRequest], in_flight: int) -> list[Outcome]:
        return in_waves(self._answer, requests, in_flight)

    @torch.inference_mode()
    def _answer(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        start, clock = time.perf_counter(), _FirstTokenClock()
        on_the_host, options = self._inputs(batch)
        inputs = {name: tensor.to(self._device) for name, tensor in on_the_host.items()}
        limits = {"max_new_tokens": batch[0].max_tokens, "do_sample": False, "streamer": clock}
        if batch[0].ignore_eos:
            limits["min_new_tokens"] = batch[0].max_tokens
        rows = self.model.generate(**inputs, **options, **limits).tolist()
        prompt_length = 0 if batch[0].kind == "audio" else inputs["input_ids"].shape[1]
        latency_s = time.perf_counter() - start
        ttft_s = clock.puts[1] - start if len(clock.puts) > 1 else None
        return [self._outcome(row[prompt_length:], batch[0].ignore_eos, latency_s, ttft_s) for row in rows]

    def close(self) -> None:
        self.model = None

    def _inputs(self, batch: Sequence[BenchRequest]) -> tuple[dict[str, Any], dict[str, Any]]:
        if batch[0].kind == "audio":
            clips = [soundfile.read(io.BytesIO(request.clip), dtype="float32")[0] for request in batch]
            features = self._processor(clips, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
            english = {"language": "en", "task": "transcribe"} if self._info.generation.get("is_multilingual") else {}
            return {"input_features": features.to(self._dtype)}, english
        if batch[0].kind == "text":
            return self._pad([request.prompt_token_ids for request in batch]), {}
        images = [Image.open(io.BytesIO(data)).convert("RGB") for request in batch for data in request.pictures]
        pixels = self._processor(images=images, return_tensors="pt")
        counts = iter((pixels["image_grid_thw"].prod(-1) // self._processor.merge_size**2).tolist())
        placeholder = self._info.placeholder_token_id
        prompts = [
            [token for token in request.prompt_token_ids for _ in range(next(counts) if token == placeholder else 1)]
            for request in batch
        ]
        inputs = self._pad(prompts)
        inputs["mm_token_type_ids"] = torch.eq(inputs["input_ids"], placeholder or 0).long()
        inputs["image_grid_thw"] = pixels["image_grid_thw"]
        return {**inputs, "pixel_values": pixels["pixel_values"].to(self._dtype)}, {}

    def _pad(self, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """On the left, as `generate` wants it."""
        width = max(map(len, prompts))
        pad = self._info.eos_token_ids[0]
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return {"input_ids": ids, "attention_mask": mask}

    def _outcome(self, tokens: list[int], ignore_eos: bool, latency_s: float, ttft_s: float | None) -> Outcome:
        """The end-of-sequence token counts as a token, as it does for the others, but is no part of the text."""
        ends = () if ignore_eos else self._info.eos_token_ids
        length = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
        return Outcome(self._text.decode(tokens[:length]), min(length + 1, len(tokens)), latency_s, ttft_s)
