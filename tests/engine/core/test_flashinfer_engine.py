"""The engine with FlashInfer's backend, its kernels being a fake's, gives the tokens that it gives with PyTorch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.sampling_params import SamplingParams
from engine.attention.metadata import cross_plans_reused
from engine.llm import LLM
from tests import tiny_models
from tests.fake_flashinfer.dense import Wrapper
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.media_files import sound_file, tone
from tests.tiny import encdec

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 4}
"""Prompts come in pieces, and decodes run beside them."""


def texts() -> list[Any]:
    return [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 31, 9, 50, 1)]


def sounds() -> list[Any]:
    return [
        {"prompt_token_ids": [257, 258 + index], "multi_modal_data": {"audio": sound_file(tone(seconds))}}
        for index, seconds in enumerate((0.1, 0.6, 0.9))
    ]


def tokens(folder: Path, prompts: list[Any], backend: str, dtype: str = "float32") -> list[list[int]]:
    with flashinfer_on_cpu():
        llm = LLM(folder, attention_backend=backend, **SMALL, dtype=dtype)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def assert_same_tokens(folder: Path, prompts: list[Any]) -> None:
    before = Wrapper.num_plans
    expected = tokens(folder, prompts, "torch")
    assert Wrapper.num_plans == before
    assert tokens(folder, prompts, "flashinfer") == expected
    assert Wrapper.num_plans > before
    assert len({tuple(one) for one in expected}) > 1


def test_text_models_give_the_same_tokens(tmp_path: Path) -> None:
    assert_same_tokens(tiny_models.make_llama(tmp_path, head_dim=64), texts())


def test_groups_of_seven_heads_give_the_same_tokens(tmp_path: Path) -> None:
    folder = tiny_models.make_qwen2(tmp_path, head_dim=64, num_attention_heads=14, num_key_value_heads=2)
    assert_same_tokens(folder, texts())


def test_half_precision_begins_with_the_same_tokens(tmp_path: Path) -> None:
    """Later ones may differ: the two round differently."""
    folder = tiny_models.make_llama(tmp_path, head_dim=64)
    got, expected = (tokens(folder, texts(), backend, "bfloat16") for backend in ("flashinfer", "torch"))
    assert [one[:2] for one in got] == [one[:2] for one in expected]


@pytest.mark.parametrize("make", [encdec.make_bart, encdec.make_t5], ids=["bart", "t5"])
def test_encoder_decoders_give_the_same_tokens(tmp_path: Path, make: Any) -> None:
    sizes = {"d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    folder = make(tmp_path, **(sizes if make is encdec.make_bart else {"d_kv": 64}))
    prompts = [{"encoder_prompt": {"prompt_token_ids": list(range(7, 7 + n))}, "decoder_prompt": None} for n in (4, 19)]
    assert_same_tokens(folder, prompts)


def test_speech_gives_the_same_tokens_and_keeps_its_plans_of_cross_attention(tmp_path: Path) -> None:
    sizes = {"d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    reused = cross_plans_reused.value
    assert_same_tokens(tiny_models.make_whisper(tmp_path, **sizes), sounds())
    assert cross_plans_reused.value > reused
