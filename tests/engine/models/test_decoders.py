"""Our decoders compute what transformers' do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from common.errors import TriptychError
from common.model_info import load_model_info
from engine.models.llama import MULTIMODAL_LAYOUT, LlamaDecoder
from tests import tiny_models
from tests.engine.models.dense import decoder_of, edit_json, logits_of

NUM_TOKENS = 40
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@torch.inference_mode()
def transformers_logits(folder: Path, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: torch.Tensor = model(input_ids=input_ids[None], **inputs).logits[0]
    return logits


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_llama_equals_transformers(llama: Path, input_ids: torch.Tensor) -> None:
    assert_equal_logits(logits_of(decoder_of(llama), input_ids), transformers_logits(llama, input_ids))


def test_qwen2_equals_transformers(qwen2: Path, input_ids: torch.Tensor) -> None:
    assert_equal_logits(logits_of(decoder_of(qwen2), input_ids), transformers_logits(qwen2, input_ids))


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": YARN_ROPE},
    ],
    ids=["biases", "one kv head", "linear rope", "llama3 rope", "yarn rope"],
)
def test_llama_variants_equal_transformers(tmp_path: Path, input_ids: torch.Tensor, overrides: dict[str, Any]) -> None:
    folder = tiny_models.make_llama(tmp_path / "model", **overrides)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_configs_from_before_rope_parameters_are_understood(tmp_path: Path, input_ids: torch.Tensor) -> None:
    folder = tiny_models.make_llama(tmp_path / "model", rope_parameters=LLAMA3_ROPE)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    new = logits_of(decoder_of(folder), input_ids)
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(decoder_of(folder), input_ids), new)


@pytest.mark.parametrize(
    "added",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"original_max_position_embeddings": 32},
    ],
    ids=["rope_scaling", "original length outside"],
)
def test_rope_that_was_written_into_a_saved_config_goes_first_as_in_transformers(
    tmp_path: Path, input_ids: torch.Tensor, added: dict[str, Any]
) -> None:
    folder = tiny_models.make_llama(tmp_path / "model", rope_parameters=YARN_ROPE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **added}))
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))


def test_flat_configs_of_qwen2_5_vl_are_understood(qwen2_5_vl: Path, tmp_path: Path, input_ids: torch.Tensor) -> None:
    folder = tmp_path / "flat"
    shutil.copytree(qwen2_5_vl, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    section = text.pop("rope_parameters")["mrope_section"]
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": section}}
    (folder / "config.json").write_text(json.dumps({**text, **config, **old}))
    positions = torch.arange(3 * NUM_TOKENS).view(3, NUM_TOKENS)
    expected = logits_of(decoder_of(qwen2_5_vl), input_ids, positions)
    assert torch.equal(logits_of(decoder_of(folder), input_ids, positions), expected)


def test_positions_need_not_begin_at_zero(llama: Path, input_ids: torch.Tensor) -> None:
    positions = torch.arange(100, 100 + NUM_TOKENS)
    theirs = transformers_logits(llama, input_ids, position_ids=positions[None])
    assert_equal_logits(logits_of(decoder_of(llama), input_ids, positions), theirs)


@torch.inference_mode()
def test_qwen2_5_vl_turns_by_time_height_and_width(qwen2_5_vl: Path, input_ids: torch.Tensor) -> None:
    theirs = Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen2_5_vl).eval()
    positions = torch.randint(0, 60, (3, NUM_TOKENS), generator=torch.Generator().manual_seed(2))
    ours = decoder_of(qwen2_5_vl)
    assert ours.spec.mrope_section == (2, 3, 3)
    expected = theirs(input_ids=input_ids[None], position_ids=positions[:, None]).logits[0]
    assert_equal_logits(logits_of(ours, input_ids, positions), expected)
    flat = torch.arange(NUM_TOKENS)
    assert torch.equal(logits_of(ours, input_ids, flat), logits_of(ours, input_ids, flat.expand(3, -1)))


@torch.inference_mode()
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_whisper_equals_transformers(tmp_path: Path, activation: str, input_ids: torch.Tensor) -> None:
    whisper = tiny_models.make_whisper(tmp_path / "whisper", activation_function=activation)
    theirs = WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    encoder_output = torch.randn(1500, 64, generator=torch.Generator().manual_seed(3))
    ours = decoder_of(whisper)
    assert ours.spec.has_cross_attention
    expected = theirs(encoder_outputs=(encoder_output[None],), decoder_input_ids=input_ids[None]).logits[0]
    assert_equal_logits(logits_of(ours, input_ids, encoder_output=encoder_output), expected)


def test_bfloat16_is_close_to_float32(llama: Path, input_ids: torch.Tensor) -> None:
    full = logits_of(decoder_of(llama), input_ids)
    half = logits_of(decoder_of(llama, torch.bfloat16), input_ids)
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).norm() < 0.05 * full.norm()


def test_the_callers_embeddings_are_left_alone(llama: Path, whisper: Path, input_ids: torch.Tensor) -> None:
    for folder, encoder_output in ((llama, None), (whisper, torch.zeros(1500, 64))):
        model = decoder_of(folder)
        table = model.get_parameter("embed_tokens.weight").clone()
        logits_of(model, input_ids, encoder_output=encoder_output)
        assert torch.equal(table, model.get_parameter("embed_tokens.weight"))


def test_a_model_without_cross_attention_says_so(llama: Path) -> None:
    with pytest.raises(TypeError, match="LlamaDecoder has no cross-attention"):
        decoder_of(llama).project_cross(0, torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_what_is_not_supported_is_refused_at_load(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    folder = tiny_models.make_llama(tmp_path / "model", **overrides)
    with pytest.raises(TriptychError, match=message):
        decoder_of(folder)


@pytest.mark.parametrize("section", [[2, 3], [2, 3, 2], [3, 3, 3], [16, 24, 24], [8]], ids=str)
def test_sections_that_do_not_fit_the_heads_are_refused_at_load(
    qwen2_5_vl: Path, tmp_path: Path, section: list[int]
) -> None:
    folder = Path(shutil.copytree(qwen2_5_vl, tmp_path / "model"))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    edit_json(
        folder / "config.json",
        lambda config: {**config, "text_config": {**config["text_config"], "rope_parameters": rope}},
    )
    said = f"mrope_section {section} is not three numbers with the sum 8, half of head_dim"
    with pytest.raises(TriptychError, match=re.escape(said)):
        decoder_of(folder)


def test_old_names_of_qwen2_5_vl_and_new_ones_lead_to_the_same_tensors() -> None:
    for name in ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"):
        assert MULTIMODAL_LAYOUT.local_name(name) == "layers.0.mlp.up_proj.weight"
    for name in ("visual.merger.mlp.0.weight", "model.visual.merger.mlp.0.weight", "layers.0.rotary_emb.inv_freq"):
        assert MULTIMODAL_LAYOUT.local_name(name) is None
    assert MULTIMODAL_LAYOUT.local_name("lm_head.weight") == "lm_head.weight"


def test_a_model_uses_no_memory_before_it_is_loaded(qwen2_5_vl: Path) -> None:
    info = load_model_info(str(qwen2_5_vl))
    with torch.device("meta"):
        model = LlamaDecoder(info)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    cosines, _ = model.rotary(torch.arange(2), torch.float32)
    assert not cosines.is_meta


def test_a_decoder_loads_without_transformers(llama: Path) -> None:
    program = (
        "import sys, torch; from common.model_info import load_model_info; from engine.models import registry;"
        "registry.load_decoder(load_model_info(sys.argv[1]), torch.device('cpu'), torch.float32);"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(llama)], check=True, timeout=120)
