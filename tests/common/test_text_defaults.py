"""Where a config.json is silent, a decoder is what transformers' configuration classes make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from common.model_info import TEXT_DEFAULTS, load_model_info, text_defaults


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    theirs = AutoConfig.for_model(kind).to_dict()
    rope = theirs["rope_parameters"]
    theirs["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]
    ours = TEXT_DEFAULTS[kind]
    assert {key: theirs[key] for key in ours} == ours


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2"}}, "qwen2"),
        ({"model_type": "qwen2_vl"}, "qwen2_vl_text"),
        ({"model_type": "llama"}, "llama"),
    ],
)
def test_nested_and_flat_configs_name_their_decoder(config: dict[str, Any], kind: str) -> None:
    assert text_defaults(config) is TEXT_DEFAULTS[kind]


def test_what_a_config_says_goes_before_defaults() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}, "hidden_size": 7}
    text = replace(load_model_info("signpost"), config=config).text_config
    assert (text["vocab_size"], text["hidden_size"], text["intermediate_size"]) == (32_064, 7, 11_008)
