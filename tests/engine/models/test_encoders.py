"""Encoder outputs are transformers', alone and in any company, and exactly as large as announced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, WhisperForConditionalGeneration

from common.model_info import load_model_info
from engine import processors
from engine.models.base import EncoderModel
from engine.models.registry import load_encoder
from engine.processors import ProcessedInput
from tests.engine.models.media import encoded, noise, sound_file, tone

SIZES = ((28, 28), (84, 140), (196, 112), (28, 196), (150, 75))


@pytest.fixture(autouse=True)
def _leave_no_worker() -> Iterator[None]:
    yield
    processors._worker = None


def encoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> EncoderModel:
    return load_encoder(load_model_info(str(folder)), torch.device("cpu"), dtype)[0]


def pictures(folder: Path, dtype: str = "float32") -> list[ProcessedInput]:
    processors.init_worker(str(folder), dtype)
    return [processors.process("image", encoded(noise(*size, seed=seed))) for seed, size in enumerate(SIZES)]


def clips(folder: Path) -> list[ProcessedInput]:
    processors.init_worker(str(folder), "float32")
    return [processors.process("audio", sound_file(tone(seconds))) for seconds in (0.1, 1.0, 3.0)]


@torch.inference_mode()
def test_pictures_equal_transformers_alone_and_together(qwen2_5_vl: Path) -> None:
    encoder, items = encoder_of(qwen2_5_vl), pictures(qwen2_5_vl)
    tower = Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen2_5_vl).eval().model.visual
    together = encoder.encode(items)
    for item, output in zip(items, together, strict=True):
        pixels = torch.from_numpy(item.arrays["pixel_values"])
        grid = torch.from_numpy(item.arrays["image_grid_thw"])[None]
        torch.testing.assert_close(output, tower(pixels, grid_thw=grid).pooler_output, rtol=0, atol=1e-5)
        torch.testing.assert_close(output, encoder.encode([item])[0], rtol=0, atol=1e-5)
        assert tuple(output.shape) == item.shape
        assert output.nbytes == item.size_bytes


@torch.inference_mode()
def test_clips_equal_transformers_alone_and_together(whisper: Path) -> None:
    encoder, items = encoder_of(whisper), clips(whisper)
    tower = WhisperForConditionalGeneration.from_pretrained(whisper).eval().model.encoder
    together = encoder.encode(items)
    for item, output in zip(items, together, strict=True):
        features = torch.from_numpy(item.arrays["input_features"])[None]
        torch.testing.assert_close(output, tower(features).last_hidden_state[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(output, encoder.encode([item])[0], rtol=0, atol=1e-5)
        assert tuple(output.shape) == item.shape
        assert output.nbytes == item.size_bytes


def test_bfloat16_stays_bfloat16(qwen2_5_vl: Path) -> None:
    items = pictures(qwen2_5_vl, "bfloat16")
    half = encoder_of(qwen2_5_vl, torch.bfloat16).encode(items)
    full = encoder_of(qwen2_5_vl).encode(items)
    for item, low, high in zip(items, half, full, strict=True):
        assert low.dtype == torch.bfloat16
        assert low.nbytes == item.size_bytes
        assert (low.float() - high).norm() < 0.1 * high.norm()
