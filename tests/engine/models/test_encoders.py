"""Encoder outputs are transformers', alone and in any company, and exactly as large as announced."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration, WhisperForConditionalGeneration

from engine import processors
from engine.processors import ProcessedInput
from tests.engine.models.dense import edit_json
from tests.engine.models.encoders import PATCHES_ATOL, assert_bfloat16_close, assert_outputs_equal, pictures
from tests.media_files import sound_file, tone


def clips(folder: Path) -> list[ProcessedInput]:
    processors.init_worker(str(folder), "float32")
    return [processors.process("audio", sound_file(tone(seconds))) for seconds in (0.1, 1.0, 3.0)]


def assert_pictures_equal_transformers(folder: Path) -> None:
    tower = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval().double().model.visual

    def expected(item: ProcessedInput) -> torch.Tensor:
        pixels = torch.from_numpy(item.arrays["pixel_values"]).double()
        grid = torch.from_numpy(item.arrays["image_grid_thw"])[None]
        return tower(pixels, grid_thw=grid).pooler_output.float()

    assert_outputs_equal(folder, pictures(folder), expected, atol=PATCHES_ATOL)


def test_pictures_equal_transformers_alone_and_together(qwen2_5_vl: Path) -> None:
    assert_pictures_equal_transformers(qwen2_5_vl)


def test_a_tower_has_the_activation_of_its_configuration_and_any_attention(qwen2_5_vl: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen2_5_vl, tmp_path / "model"))

    def change(config: dict[str, Any]) -> dict[str, Any]:
        vision = config["vision_config"] | {"hidden_act": "gelu"}
        return config | {"attn_implementation": "eager", "vision_config": vision}

    edit_json(folder / "config.json", change)
    assert_pictures_equal_transformers(folder)


def test_clips_equal_transformers_alone_and_together(whisper: Path) -> None:
    tower = WhisperForConditionalGeneration.from_pretrained(whisper).eval().model.encoder

    def expected(item: ProcessedInput) -> torch.Tensor:
        return tower(torch.from_numpy(item.arrays["input_features"])[None]).last_hidden_state[0]

    assert_outputs_equal(whisper, clips(whisper), expected)


def test_bfloat16_stays_bfloat16(qwen2_5_vl: Path) -> None:
    assert_bfloat16_close(qwen2_5_vl, pictures(qwen2_5_vl, "bfloat16"))
