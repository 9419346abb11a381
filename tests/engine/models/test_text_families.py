"""Qwen3 and Mistral compute what transformers' do; where they go their own way from Llama is covered here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from common.model_info import load_model_info
from engine.models.config import read_text_config
from tests.engine.models.dense import decoder_of, edit_json, logits_of
from tests.engine.models.test_decoders import assert_equal_logits, transformers_logits
from tests.tiny.text import make_mistral, make_qwen3
from tests.tiny_models import make_llama, make_qwen2


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True, "tie_word_embeddings": False}, {"head_dim": 16, "num_key_value_heads": 4}],
    ids=["as published", "biases", "a head for each"],
)
def test_qwen3_equals_transformers(tmp_path: Path, input_ids: torch.Tensor, overrides: dict[str, Any]) -> None:
    folder = make_qwen3(tmp_path / "model", **overrides)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


@pytest.mark.parametrize("sliding_window", [None, 1, 16, 40, 512])
def test_mistral_equals_transformers(tmp_path: Path, input_ids: torch.Tensor, sliding_window: int | None) -> None:
    folder = make_mistral(tmp_path / "model", sliding_window=sliding_window)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_a_window_changes_what_mistral_computes(tmp_path: Path, input_ids: torch.Tensor) -> None:
    narrow, wide = (
        logits_of(decoder_of(make_mistral(tmp_path / str(window), sliding_window=window)), input_ids)
        for window in (16, 512)
    )
    torch.testing.assert_close(narrow[:16], wide[:16])
    assert not torch.allclose(narrow[16:], wide[16:])


@pytest.mark.parametrize("make", [make_qwen2, make_qwen3])
def test_windows_of_the_upper_layers_of_qwen_equal_transformers(
    tmp_path: Path, input_ids: torch.Tensor, make: Callable[..., Path]
) -> None:
    folder = make(tmp_path / "model", use_sliding_window=True, max_window_layers=1, sliding_window=8)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_layers_without_a_window_of_ministral_which_calls_itself_mistral_see_all(
    tmp_path: Path, input_ids: torch.Tensor
) -> None:
    folder = make_mistral(tmp_path / "model", layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert read_text_config(load_model_info(str(folder))).windows == (None, 16, None)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_a_window_of_a_model_whose_layers_nobody_named_is_refused(tmp_path: Path, model_type: str) -> None:
    folder = make_mistral(tmp_path / "model")
    edit_json(folder / "config.json", lambda config: {**config, "model_type": model_type})
    with pytest.raises(ValueError, match=f"sliding_window of model_type '{model_type}' is not supported"):
        read_text_config(load_model_info(str(folder)))


@pytest.mark.parametrize(
    ("layer_types", "is_served"),
    [(["full_attention"] * 3, True), (["full_attention", "sliding_attention", "full_attention"], False)],
    ids=["none slides", "one slides"],
)
def test_a_window_that_no_layer_has_is_none_whatever_the_model_is(
    tmp_path: Path, input_ids: torch.Tensor, layer_types: list[str], is_served: bool
) -> None:
    folder = make_llama(tmp_path / "model", sliding_window=8, layer_types=layer_types)
    if is_served:
        assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))
    else:
        with pytest.raises(ValueError, match="sliding_window of model_type 'llama' is not supported"):
            read_text_config(load_model_info(str(folder)))


@pytest.mark.parametrize("sliding_window", [None, 512])
def test_a_window_as_long_as_the_context_is_none_whatever_the_model_is(
    tmp_path: Path, sliding_window: int | None
) -> None:
    folder = make_llama(tmp_path / "model", sliding_window=sliding_window)
    assert read_text_config(load_model_info(str(folder))).windows == (None,) * 3


def test_what_a_config_does_not_say_about_windows_is_as_in_transformers(tmp_path: Path) -> None:
    folder = make_mistral(tmp_path / "model", max_position_embeddings=8192)
    edit_json(folder / "config.json", lambda config: {k: v for k, v in config.items() if k != "sliding_window"})
    assert read_text_config(load_model_info(str(folder))).windows == (4096,) * 3
    edit_json(folder / "config.json", lambda config: {**config, "sliding_window": None})
    assert read_text_config(load_model_info(str(folder))).windows == (None,) * 3


def test_a_config_without_a_head_dim_has_that_of_transformers(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model")
    edit_json(folder / "config.json", lambda config: {k: v for k, v in config.items() if k != "head_dim"})
    assert read_text_config(load_model_info(str(folder))).head_dim == Qwen3Config().head_dim
