"""Adapters that cannot be served are refused at the start, by a sentence that names what is in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import TriptychError
from common.model_info import load_model_info
from engine.models.base import DecoderModel
from engine.models.lora.pool import AdapterPool
from engine.models.registry import make_decoder
from tests.tiny.lora import write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
GOOD = {f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(64, 4)}


def make_pool(model: Path, adapter: Path) -> AdapterPool:
    info = load_model_info(str(model), [f"it={adapter}"])
    decoder: DecoderModel = make_decoder(info)
    return AdapterPool(decoder, info, 1, torch.device("cpu"), torch.float32)


def refusal(model: Path, adapter: Path) -> str:
    with pytest.raises(TriptychError) as caught:
        make_pool(model, adapter)
    message = caught.value.info.message
    assert "'it'" in message
    return message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.w"]),
        ("layer_replication", [[0, 1]]),
    ],
)
def test_what_the_configuration_asks_for_is_named(llama: Path, tmp_path: Path, key: str, value: Any) -> None:
    said = refusal(llama, write_adapter(tmp_path / "adapter", GOOD, **{key: value}))
    assert f"{key} = {value!r}" in said
    assert "supported: LoRA" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [("lora_alpha", None), ("lora_alpha", "much"), ("alpha_pattern", {"(": 2}), ("alpha_pattern", [1])],
)
def test_factors_that_cannot_be_read_are_named(llama: Path, tmp_path: Path, key: str, value: Any) -> None:
    assert "alpha" in refusal(llama, write_adapter(tmp_path / "adapter", GOOD, **{key: value}))


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", None])
def test_how_it_began_does_not_matter_where_the_model_stayed_as_it_is(llama: Path, tmp_path: Path, start: Any) -> None:
    pool = make_pool(llama, write_adapter(tmp_path / "adapter", GOOD, init_lora_weights=start))
    assert pool.capacity_bytes == 4 * (64 * 4 + 4 * 128), "A of q_proj, and B of the fused layer of 64 + 2 * 32 rows"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "lm_head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 64)}, "embed_tokens.lora_embedding_A"),
        ({"base_model.model.lm_head.weight": torch.ones(4, 64)}, "lm_head.weight"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector"),
        ({f"{Q}.lora_B.bias": torch.ones(64)}, "lora_B.bias"),
        ({f"{Q.replace('.0.', '.9.')}.lora_A.weight": torch.ones(4, 64)}, "layers.9"),
        ({f"{Q}.lora_A.weight": GOOD[f"{Q}.lora_A.weight"]}, "lora_B.weight"),
        ({f"{Q}.lora_B.weight": GOOD[f"{Q}.lora_B.weight"]}, "lora_A.weight"),
        ({**GOOD, f"{Q}.lora_A.weight": torch.ones(4, 48)}, "(4, 48)"),
        ({**GOOD, f"{Q}.lora_B.weight": torch.ones(48, 4)}, "(48, 4)"),
        ({**GOOD, f"{Q}.lora_A.weight": torch.ones(5, 64)}, "(5, 64)"),
        ({**GOOD, f"{Q}.lora_A.weight": torch.ones(0, 64), f"{Q}.lora_B.weight": torch.ones(64, 0)}, "(0, 64)"),
        ({**GOOD, f"{Q}.lora_A.weight": torch.ones(())}, "[()"),
        ({}, "no weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_does_not_fit_is_named(
    llama: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], named: str
) -> None:
    assert named in refusal(llama, write_adapter(tmp_path / "adapter", tensors))


def test_an_adapter_of_the_encoder_is_refused(qwen2_5_vl: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.visual.blocks.0.attn.proj"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 32), f"{name}.lora_B.weight": torch.ones(32, 4)}
    assert "visual.blocks.0.attn.proj" in refusal(qwen2_5_vl, write_adapter(tmp_path / "adapter", tensors))


def test_an_encoder_decoder_model_takes_no_adapters(whisper: Path, tmp_path: Path) -> None:
    with pytest.raises(TriptychError, match="cross-attention") as caught:
        make_pool(whisper, write_adapter(tmp_path / "adapter", GOOD))
    assert caught.value.info.param == "lora_modules"


def test_files_that_are_missing_cut_or_of_another_format_are_named(llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", GOOD)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(TriptychError, match="cut off"):
        make_pool(llama, folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(TriptychError, match=r"adapter_model\.safetensors.*adapter_model\.bin"):
        make_pool(llama, folder)
    write_adapter(folder, GOOD)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(TriptychError, match=r"adapter_config\.json"):
        make_pool(llama, folder)


def test_folders_are_checked_before_anything_is_loaded(llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "poems", GOOD)
    assert load_model_info(str(llama), [str(folder)]).adapters == {"poems": folder}
    assert load_model_info(str(llama), [f"a={folder}", f"b={folder}"]).adapters == {"a": folder, "b": folder}
    for given, words in (
        ([f"a={folder}", f"a={folder}"], "two adapters have the name 'a'"),
        ([f"a={tmp_path / 'none'}"], "has no adapter_config.json"),
        (["no-path"], "has no adapter_config.json"),
    ):
        with pytest.raises(TriptychError, match=words) as caught:
            load_model_info(str(llama), given)
        assert caught.value.info.param == "lora_modules"


def test_the_fingerprint_tells_adapters_apart(llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", GOOD)
    prints = [load_model_info(str(llama), given).fingerprint for given in ([], [f"a={folder}"], [f"b={folder}"])]
    write_adapter(folder, GOOD, lora_alpha=2)
    prints.append(load_model_info(str(llama), [f"a={folder}"]).fingerprint)
    config = json.loads((folder / "adapter_config.json").read_text())
    write_adapter(folder, {name: 2 * tensor for name, tensor in GOOD.items()}, **config)
    prints.append(load_model_info(str(llama), [f"a={folder}"]).fingerprint)
    assert len(set(prints)) == len(prints)
