"""Our preprocessing is transformers', to the last bit, and understands its settings files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from common.errors import TriptychError
from engine.media.log_mel import LogMel, LogMelSettings, mel_filters
from engine.processors.qwen_vl import PatchSettings, image_to_patches, target_size
from tests.media_files import noise, tone

SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_pixels": 3136, "max_pixels": 50176},
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 196 * 196}},
    {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "max_pixels": 100_000},
    {"patch_size": 16, "merge_size": 1, "temporal_patch_size": 1, "image_mean": [0.5] * 3, "image_std": [0.25] * 3},
    {"resample": 2},
]
# Read before any test, for each: transformers 5.17 writes the pixels given to one processor into the class's sizes.
DEFAULT_SIZE = dict(Qwen2VLImageProcessorPil.size)
sides = st.integers(1, 5000)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [(28, 28), (333, 201), (29, 900), (7, 7)], ids=str)
def test_patches_are_transformers(settings: dict[str, Any], size: tuple[int, int]) -> None:
    image = noise(*size)
    patches, grid = image_to_patches(image, PatchSettings.from_json(settings))
    expected = Qwen2VLImageProcessorPil(**{"size": DEFAULT_SIZE.copy(), **settings})(images=image, return_tensors="np")
    assert np.array_equal(patches, expected["pixel_values"])
    assert list(grid) == expected["image_grid_thw"][0].tolist()


@given(sides, sides, st.integers(1, 100), st.integers(100, 20_000))
def test_sizes_are_transformers(width: int, height: int, smallest: int, largest: int) -> None:
    settings = PatchSettings(min_pixels=784 * smallest, max_pixels=784 * largest)
    try:
        expected = smart_resize(height, width, 28, settings.min_pixels, settings.max_pixels)
    except ValueError:
        with pytest.raises(TriptychError, match="one side is more than 200 times the other"):
            target_size(width, height, settings)
    else:
        assert target_size(width, height, settings) == expected[::-1]


@pytest.mark.parametrize("settings", [{}, {"feature_size": 128}, {"chunk_length": 5, "feature_size": 40}], ids=str)
@pytest.mark.parametrize("seconds", [0.01, 1.7, 5.0])
def test_spectrograms_are_transformers(settings: dict[str, Any], seconds: float) -> None:
    extract = WhisperFeatureExtractor(**settings)
    ours = LogMelSettings.from_json(settings)
    assert np.array_equal(mel_filters(ours), extract.mel_filters)
    samples = tone(seconds)[:, 0] + np.random.default_rng(0).normal(0, 0.01, round(seconds * 16000)).astype(np.float32)
    expected = extract(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
    assert expected.shape == (ours.feature_size, ours.num_frames)
    assert np.array_equal(LogMel(ours)(samples), expected)


def test_settings_that_change_the_computation_are_refused() -> None:
    with pytest.raises(ValueError, match="do_resize = false is not supported"):
        PatchSettings.from_json({"do_resize": False})
    with pytest.raises(ValueError, match=r"dither = 0\.1 is not supported"):
        LogMelSettings.from_json({"dither": 0.1})
    with pytest.raises(ValueError, match="padding_side = left is not supported; only right is"):
        LogMelSettings.from_json({"padding_side": "left"})
