"""What the process pool makes of an item, and what it announces of the encoder's output."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor

from common.errors import TriptychError
from engine import processors
from tests.media_files import encoded, noise, sound_file, tone


def refused(kind: str, media: bytes) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        processors.process(kind, media)
    return caught.value


def test_clips_are_processed_as_by_transformers(whisper: Path) -> None:
    processors.init_worker(str(whisper), "float32")
    samples = tone(1.5)
    item = processors.process("audio", sound_file(samples, subtype="FLOAT"))
    extract = AutoFeatureExtractor.from_pretrained(whisper)
    expected = extract(samples[:, 0], sampling_rate=16000, return_tensors="np")["input_features"][0]
    assert np.array_equal(item.arrays["input_features"], expected)
    assert (item.shape, item.layout.expansion, item.layout.grid) == ((1500, 64), [], None)
    assert item.layout.num_encoder_tokens == 1500


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_sizes_are_those_of_the_encoders_dtype(qwen2_5_vl: Path, dtype: str, item_bytes: int) -> None:
    processors.init_worker(str(qwen2_5_vl), dtype)
    item = processors.process("image", encoded(noise(56, 84)))
    assert item.dtype == dtype
    assert item.size_bytes == math.prod(item.shape) * item_bytes == 2 * 3 * 64 * item_bytes


def test_bad_media_says_what_is_wrong(qwen2_5_vl: Path, whisper: Path) -> None:
    processors.init_worker(str(qwen2_5_vl), "float32")
    error = refused("image", encoded(noise(2, 1000)))
    assert error.info.code == "bad_media"
    assert error.info.message == "a picture of 2 x 1000 pixels: one side is more than 200 times the other"
    processors.init_worker(str(whisper), "float32")
    error = refused("audio", sound_file(tone(31)))
    assert error.info.code == "bad_media"
    assert error.info.message == "the clip is 31.00 s long; at most 30 s are accepted"


def test_another_kind_than_the_models_is_refused(qwen2_5_vl: Path) -> None:
    processors.init_worker(str(qwen2_5_vl), "float32")
    error = refused("audio", sound_file(tone(1)))
    assert (error.info.code, error.info.message) == ("invalid_request", "qwen2_5_vl takes image and video, not audio")


def test_what_cannot_be_set_up_is_refused(llama: Path, qwen2_5_vl: Path) -> None:
    with pytest.raises(TriptychError, match="llama is a text model: it takes no media"):
        processors.init_worker(str(llama), "float32")
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32, bfloat16, float16"):
        processors.init_worker(str(qwen2_5_vl), "int8")
    with pytest.raises(RuntimeError, match="before init_worker"):
        processors.process("image", b"")


def test_in_this_process_threads_are_left_alone(qwen2_5_vl: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        processors.init_worker(str(qwen2_5_vl), "float32")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_spawned_pool_survives_bad_media_and_imports_no_torch(qwen2_5_vl: Path) -> None:
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), processors.init_worker, (str(qwen2_5_vl), "float32")
    ) as pool:
        bad = pool.submit(processors.process, "image", b"nothing")
        good = pool.submit(processors.process, "image", encoded(noise(56, 56)))
        loaded = pool.submit(eval, "set(__import__('sys').modules)")
        error: Any = bad.exception(timeout=60)
        assert isinstance(error, TriptychError)
        assert (error.info.code, error.info.message[:21]) == ("bad_media", "the picture (7 bytes)")
        assert good.result(timeout=60).shape == (4, 64)
        assert {"torch", "transformers"}.isdisjoint(loaded.result(timeout=60))


def test_a_spawned_pool_uses_one_thread_per_process(whisper: Path) -> None:
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), processors.init_worker, (str(whisper), "float32")
    ) as pool:
        assert pool.submit(torch.get_num_threads).result(timeout=60) == 1
