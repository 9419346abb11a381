"""SmolVLM's rules for videos are those of transformers' video processor; numbers are words as num2words has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor, get_resize_output_image_size
from transformers.video_utils import VideoMetadata

from common.media.video_rules import FrameRules, frame_text, words_of


@given(
    st.integers(1, 3000), st.sampled_from([1.0, 5.0, 24.0, 29.97, 30.0, 60.0]), st.integers(1, 80), st.integers(1, 4)
)
def test_frames_are_sampled_as_by_transformers(num_frames: int, fps: float, most: int, rate: int) -> None:
    metadata = VideoMetadata(num_frames, fps, duration=num_frames / fps)
    own: Any = SimpleNamespace(num_frames=most, fps=rate)
    theirs = SmolVLMVideoProcessor.sample_frames(own, metadata)
    assert FrameRules(fps=float(rate), num_frames=most).sample(num_frames, fps) == theirs.tolist()


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([56, 512, 1536, 5000]))
def test_frames_are_scaled_as_by_transformers(width: int, height: int, longest: int) -> None:
    theirs = get_resize_output_image_size(torch.empty(1, 3, height, width, device="meta"), longest)
    assert FrameRules(longest_edge=longest).frame_size(width, height, 1)[::-1] == theirs


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"),
        (19, "nineteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (768, "seven hundred and sixty-eight"),
        (1000, "one thousand"),
        (1005, "one thousand and five"),
        (1234, "one thousand, two hundred and thirty-four"),
        (21_300, "twenty-one thousand, three hundred"),
    ],
)
def test_numbers_are_words(number: int, words: str) -> None:
    assert words_of(number) == words


def test_times_are_minutes_and_seconds() -> None:
    assert frame_text(59.99).startswith("\nFrame from 00:59:<fake")
    assert frame_text(3661.2).startswith("\nFrame from 61:01:<fake")
    text = FrameRules().prompt_text([30, 60], 2000, 30.0)
    assert text.startswith("You are provided the following series of two frames from a 0:01:06 [H:MM:SS] video.\n\n")
    assert text.endswith("Frame from 00:01:<fake_token_around_image><global-img><image><fake_token_around_image>\n\n")
