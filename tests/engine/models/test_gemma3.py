"""Gemma 3: logits, pixels, prompts and encoder outputs are transformers', and older folders load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Gemma3Processor, PreTrainedTokenizerFast

from common.errors import TriptychError
from common.model_info import load_model_info
from common.text.processor import TextProcessor
from engine.processors import ProcessedInput
from engine.processors.gemma3 import Gemma3Processor as OurProcessor
from tests.engine.models.dense import decoder_of, edit_json, logits_of
from tests.engine.models.encoders import assert_bfloat16_close, assert_outputs_equal, pictures
from tests.engine.models.test_decoders import assert_equal_logits, transformers_logits
from tests.equality.processors import image_processor
from tests.media_files import encoded, noise
from tests.tiny.gemma3 import make_gemma3, make_gemma3_text

SIZES = ((56, 56), (84, 140), (30, 29), (200, 75))
PARTS: list[dict[str, Any]] = [{"type": "text", "text": "a\n"}, {"type": "image"}, {"type": "text", "text": "\nb"}]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "attention_bias": True},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            }
        },
    ],
    ids=["as published", "layer types", "scaled", "scaled within windows"],
)
def test_logits_equal_transformers(tmp_path: Path, input_ids: torch.Tensor, overrides: dict[str, Any]) -> None:
    folder = make_gemma3_text(tmp_path / "model", **overrides)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_a_folder_from_before_rope_parameters_equals_transformers(tmp_path: Path, input_ids: torch.Tensor) -> None:
    def older(config: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
        scaling = {"rope_type": "linear", "factor": 4.0}
        return {**kept, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}

    folder = make_gemma3_text(tmp_path / "model")
    edit_json(folder / "config.json", older)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_rope_scaling_beside_rope_parameters_scales_layers_without_a_window(
    tmp_path: Path, input_ids: torch.Tensor
) -> None:
    folder = make_gemma3_text(tmp_path / "model")
    scaling = {"rope_type": "linear", "factor": 8.0}
    edit_json(folder / "config.json", lambda config: {**config, "rope_scaling": scaling})
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_the_activation_is_the_one_that_transformers_reads(tmp_path: Path, input_ids: torch.Tensor) -> None:
    folder = make_gemma3_text(tmp_path / "model")
    edit_json(folder / "config.json", lambda config: {**config, "hidden_act": "gelu"})
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    folder = make_gemma3_text(tmp_path / "model", final_logit_softcapping=30.0)
    with pytest.raises(TriptychError, match="final_logit_softcapping is not supported"):
        decoder_of(folder)
    folder = make_gemma3(tmp_path / "images")
    edit_json(folder / "preprocessor_config.json", lambda json: {**json, "do_pan_and_scan": True})
    with pytest.raises(ValueError, match="do_pan_and_scan is not supported"):
        OurProcessor(load_model_info(str(folder)))


def test_pixels_and_prompts_equal_transformers(tmp_path: Path) -> None:
    folder = make_gemma3(tmp_path / "model")
    info, tokenizer = load_model_info(str(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    images = image_processor(folder)
    num_tokens = int(info.config["mm_tokens_per_image"])
    processor = Gemma3Processor(images, tokenizer, image_seq_length=num_tokens)
    for size in SIZES:
        arrays, _, _ = OurProcessor(info)(encoded(noise(*size)))
        theirs = images(images=[noise(*size)], return_tensors="np")["pixel_values"][0]
        assert np.array_equal(arrays["pixel_values"], theirs)
    text = TextProcessor(info)
    ours = text.render_chat([{"role": "user", "content": PARTS}])
    written = "<|im_start|>user\na\n<start_of_image>\nb<|im_end|>\n<|im_start|>assistant\n"
    theirs = processor(text=written, images=[noise(56, 56)], return_tensors="np")["input_ids"][0].tolist()
    placeholder = info.placeholder_token_id
    assert [token for one in ours for token in [one] * (num_tokens if one == placeholder else 1)] == theirs


def test_encoder_outputs_equal_transformers(tmp_path: Path) -> None:
    folder = make_gemma3(tmp_path / "model")
    reference: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def expected(item: ProcessedInput) -> Tensor:
        pixels = torch.from_numpy(item.arrays["pixel_values"])[None]
        features: Tensor = reference.model.get_image_features(pixels).pooler_output[0]
        return features

    assert_outputs_equal(folder, pictures(folder, sizes=SIZES), expected, atol=1e-4)
    assert_bfloat16_close(folder, pictures(folder, "bfloat16", SIZES))
