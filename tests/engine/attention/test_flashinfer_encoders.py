"""Encoders of transformers give the same rows with FlashInfer's attention, computed by a fake, as with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.model_info import load_model_info
from engine import processors
from engine.encoders.attention import use_flashinfer
from engine.encoders.qwen_vl import QwenVisionEncoder
from engine.models.base import EncoderModel
from engine.models.registry import load_encoder
from tests import fake_flashinfer, tiny_models
from tests.fake_flashinfer.dense import Wrapper
from tests.fake_flashinfer.installed import flashinfer_on_cpu, no_compiler
from tests.media_files import encoded, noise, sound_file, tone
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


SERVED = (64, 16)
"""Sizes of heads: tiny towers have 16, which the fake computes as well as any."""


def make_smolvlm(folder: Path) -> Path:
    """Has a name of its own, as processes that share these tests have to agree on their ids."""
    return llava.make_idefics3(folder, smolvlm=True)


MAKERS = [
    (tiny_models.make_whisper, "audio", sounds, 1),
    (tiny_models.make_qwen2_5_vl, "image", pictures, 2),  # windows and pictures
    (qwen.make_qwen2_vl, "image", pictures, 1),
    (qwen.make_qwen3_vl, "image", pictures, 1),
    (llava.make_llava, "image", pictures, 1),
    (llava.make_idefics3, "image", pictures, 1),
    (make_smolvlm, "image", pictures, 1),
]
"""With the kinds of sequences that their layers look at."""


def loaded(folder: Path) -> EncoderModel:
    encoder, _ = load_encoder(load_model_info(str(folder)), CPU, torch.float32)
    processors.init_worker(str(folder), "float32")
    return encoder


@pytest.mark.parametrize("head_dims", [SERVED, (64,)], ids=["served", "heads for PyTorch"])
@pytest.mark.parametrize(("make", "kind", "media", "kinds"), MAKERS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_encoders_give_the_same_rows_with_a_plan_for_each_kind_of_sequences(
    tmp_path: Path,
    make: Callable[[Path], Path],
    kind: Any,
    media: Callable[[], list[bytes]],
    kinds: int,
    head_dims: tuple[int, ...],
) -> None:
    encoder = loaded(make(tmp_path))
    items = [processors.process(kind, data) for data in media()]
    batches = [items, items[:1]]
    expected = [rows for batch in batches for rows in encoder.encode(batch)]
    assert encoder.unmasked is not None
    with flashinfer_on_cpu(head_dims):
        assert use_flashinfer(encoder.unmasked, CPU)
        before = Wrapper.num_plans
        got = [rows for batch in batches for rows in encoder.encode(batch)]
    assert Wrapper.num_plans - before == (len(batches) * kinds if head_dims is SERVED else 0)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [tiny_models.make_qwen2_5_vl, qwen.make_qwen2_vl], ids=["windows", "pictures"])
@torch.inference_mode()
def test_a_tower_is_told_on_the_host_all_that_it_would_fetch_from_the_device(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Without the sizes of pictures it has nothing to fetch."""
    encoder = loaded(make(tmp_path))
    assert isinstance(encoder, QwenVisionEncoder)
    items = [processors.process("image", data).arrays for data in pictures()]
    pixels = torch.cat([torch.from_numpy(arrays["pixel_values"]) for arrays in items])
    sizes = torch.stack([torch.from_numpy(arrays["image_grid_thw"]) for arrays in items])
    told = encoder.module(pixels, grid_thw=None, **encoder.layout_of(sizes, CPU))
    assert torch.equal(told.pooler_output, encoder.module(pixels, grid_thw=sizes).pooler_output)


def test_an_encoder_keeps_to_pytorch_where_kernels_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = loaded(tiny_models.make_whisper(tmp_path))
    assert encoder.unmasked is not None
    before = encoder.unmasked.config._attn_implementation
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithRaggedKVCacheWrapper, "plan", no_compiler)
    with flashinfer_on_cpu(SERVED):
        assert not use_flashinfer(encoder.unmasked, CPU)
    assert encoder.unmasked.config._attn_implementation == before
    said = capsys.readouterr()
    assert "Could not find nvcc" in said.out + said.err


def test_two_encoders_of_a_process_have_an_attention_each(tmp_path: Path) -> None:
    with flashinfer_on_cpu(SERVED):
        encoders = [loaded(make(tmp_path / make.__name__)) for make in (tiny_models.make_whisper, llava.make_llava)]
        for encoder in encoders:
            assert encoder.unmasked is not None
            use_flashinfer(encoder.unmasked, CPU)
    names = [encoder.unmasked.config._attn_implementation for encoder in encoders if encoder.unmasked is not None]
    assert len(set(names)) == 2
    assert all("flash" in name for name in names), "by this transformers sees that no mask is needed"
    first, second = (ALL_ATTENTION_FUNCTIONS[name] for name in names)
    assert first is not second
