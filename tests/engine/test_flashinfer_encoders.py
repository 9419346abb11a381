"""Encoders of transformers give the same rows with FlashInfer's attention, computed by a fake, as with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model_info import load_model_info
from engine import processors
from engine.encoders.ragged_attention import use_flashinfer
from engine.models.registry import load_encoder
from tests import tiny_models
from tests.engine.models.media import encoded, noise, sound_file, tone
from tests.fake_flashinfer.dense import Wrapper
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.tiny import llava, qwen

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_worker_left() -> Iterator[None]:
    yield
    processors._worker = None


def pictures() -> list[bytes]:
    return [encoded(noise(*size)) for size in ((56, 84), (112, 56), (140, 140))]


def sounds() -> list[bytes]:
    return [sound_file(tone(seconds)) for seconds in (0.5, 1.0)]


@pytest.mark.parametrize(
    ("make", "kind", "media", "plans"),
    [
        (tiny_models.make_whisper, "audio", sounds, 2),  # one of each batch, shared by its layers
        (tiny_models.make_qwen2_5_vl, "image", pictures, 4),  # of each batch for windows and for pictures
        (qwen.make_qwen2_vl, "image", pictures, 2),
        (qwen.make_qwen3_vl, "image", pictures, 2),
        (llava.make_llava, "image", pictures, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_encoders_give_the_same_rows_with_a_plan_for_each_batch(
    tmp_path: Path, make: Callable[[Path], Path], kind: Any, media: Callable[[], list[bytes]], plans: int
) -> None:
    info = load_model_info(str(make(tmp_path)))
    encoder, _ = load_encoder(info, CPU, torch.float32)
    processors.init_worker(str(tmp_path), "float32")
    items = [processors.process(kind, data) for data in media()]
    batches = [items, items[:1]]
    expected = [rows for batch in batches for rows in encoder.encode(batch)]
    assert encoder.unmasked is not None
    with flashinfer_on_cpu():
        use_flashinfer(encoder.unmasked, CPU)
        before = Wrapper.num_plans
        got = [rows for batch in batches for rows in encoder.encode(batch)]
    assert Wrapper.num_plans == before + plans
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
