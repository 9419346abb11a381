"""Quantised checkpoints answer as the same model with the weights that their codes stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import TriptychError
from common.model_info import load_model_info
from engine.models.checkpoint_index import CheckpointError, read_index
from engine.models.layers import Linear
from engine.models.quantised.names import check_quantised
from engine.models.quantised.weight import CodedWeight, SmallWeight
from engine.models.registry import load_decoder, load_encoder
from engine.native import quantised
from tests.engine.models.dense import decoder_of, edit_json, logits_of
from tests.engine.models.quantised.packing import (
    Array,
    Tensors,
    awq,
    fp8,
    fp8_blocks,
    gptq,
    packed,
    packed_with_one_scale,
    packed_with_unused_groups,
    quantise_folder,
)
from tests.engine.models.quantised.weights import dequantised

CPU = torch.device("cpu")
Pack = Callable[[str, Array], tuple[Tensors, Array]]


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


_GROUPED = {"type": "int", "strategy": "group", "group_size": 32}
_GPTQ = {"quant_method": "gptq", "group_size": 32}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": ({**_GPTQ, "bits": 4, "format": None}, gptq),
    "gptq v2": ({**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, partial(gptq, v2=True)),
    "gptq v2 by format": ({**_GPTQ, "bits": 4, "format": "gptq_v2", "checkpoint_format": None}, partial(gptq, v2=True)),
    "gptq act-order": ({**_GPTQ, "bits": 4, "desc_act": True}, partial(gptq, shuffled=True)),
    "gptq 8 bits": ({**_GPTQ, "bits": 8}, partial(gptq, bits=8)),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, partial(fp8, per_row=False)),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, partial(fp8_blocks, size=32)),
    "float-quantized": (compressed("float-quantized", num_bits=8, strategy="channel"), partial(fp8, per_row=True)),
    "naive-quantized": (compressed("naive-quantized", num_bits=8, strategy="channel"), partial(fp8, per_row=True)),
    "pack-quantized 4": (compressed("pack-quantized", num_bits=4, **_GROUPED), partial(packed, bits=4)),
    "pack-quantized 8": (compressed("pack-quantized", num_bits=8, **_GROUPED), partial(packed, bits=8)),
    "groups not used": (compressed("pack-quantized", num_bits=4, **_GROUPED), packed_with_unused_groups),
    "pack-quantized, one scale": (compressed("pack-quantized", num_bits=4, strategy="tensor"), packed_with_one_scale),
    "asymmetric": (compressed("pack-quantized", num_bits=4, **_GROUPED), partial(packed, bits=4, symmetric=False)),
}


@pytest.fixture(params=["kernels", "PyTorch"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "PyTorch":
        monkeypatch.setattr(quantised, "serves", lambda _: False)
    elif quantised.library() is None:
        pytest.skip("the kernels do not run here")


def weights_of(model: torch.nn.Module) -> list[object]:
    return [layer.weight for layer in model.modules() if isinstance(layer, Linear)]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("leave", [(), ("k_proj", "down_proj")], ids=["all layers", "some layers plain"])
def test_a_checkpoint_answers_as_its_dequantised_one(
    llama: Path, input_ids: torch.Tensor, tmp_path: Path, name: str, leave: tuple[str, ...]
) -> None:
    config, pack = FORMATS[name]
    exact = quantise_folder(llama, tmp_path / "model", {**config, "modules_to_not_convert": [*leave]}, pack, leave)
    model, plain = decoder_of(tmp_path / "model"), decoder_of(exact)
    shares = [isinstance(weight, SmallWeight) for weight in weights_of(model)]
    assert any(shares)
    assert all(shares) == (not leave)
    expected, got = logits_of(plain, input_ids), logits_of(model, input_ids)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    for one, other in zip(weights_of(model), weights_of(plain), strict=True):
        if isinstance(one, SmallWeight):
            assert torch.equal(dequantised(one), other)  # type: ignore[arg-type]


def test_layers_with_the_same_order_of_columns_are_a_single_product(llama: Path, tmp_path: Path) -> None:
    quantise_folder(llama, tmp_path / "model", FORMATS["awq"][0], awq, ())
    assert all(isinstance(weight, CodedWeight) for weight in weights_of(decoder_of(tmp_path / "model")))


def test_the_report_counts_small_weights(llama: Path, tmp_path: Path) -> None:
    quantise_folder(llama, tmp_path / "model", FORMATS["awq"][0], awq, ())
    model, num_bytes = load_decoder(load_model_info(str(tmp_path / "model")), CPU, torch.bfloat16)
    held = sum(weight.nbytes for weight in weights_of(model) if isinstance(weight, SmallWeight))
    assert num_bytes == held + sum(parameter.nbytes for parameter in model.parameters())


def test_scales_of_activations_and_caches_are_not_read(llama: Path, input_ids: torch.Tensor, tmp_path: Path) -> None:
    def pack(base: str, weight: Array) -> tuple[Tensors, Array]:
        tensors, values = fp8(base, weight, per_row=False)
        scale = tensors[f"{base}.weight_scale"]
        attention = base.rpartition(".")[0]
        others = {f"{base}.input_scale", f"{base.replace('_proj', '')}.k_scale", f"{attention}.kv_scale"}
        others |= {f"{base}.{name}" for name in ("activation_scale", "output_scale", "output_zero_point")}
        others |= {f"{attention}.{name}" for name in ("q_scale", "v_zero_point")}
        return {**tensors, **dict.fromkeys(others, scale)}, values

    exact = quantise_folder(llama, tmp_path / "model", FORMATS["fp8"][0], pack, ())
    got, expected = (logits_of(decoder_of(folder), input_ids) for folder in (tmp_path / "model", exact))
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_biases_of_zeros_that_older_autogptq_writes_are_passed_over(
    llama: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    def pack(base: str, weight: Array, value: float) -> tuple[Tensors, Array]:
        tensors, values = gptq(base, weight)
        return {**tensors, f"{base}.bias": np.full(len(weight), value, np.float16)}, values

    exact = quantise_folder(llama, tmp_path / "model", FORMATS["gptq"][0], partial(pack, value=0.0), ())
    got, expected = (logits_of(decoder_of(folder), input_ids) for folder in (tmp_path / "model", exact))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    quantise_folder(llama, tmp_path / "biased", FORMATS["gptq"][0], partial(pack, value=0.5), ())
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.mlp\.down_proj\.bias"):
        decoder_of(tmp_path / "biased")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "method bitsandbytes is not supported; supported: awq, gptq, fp8"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "awq with version gemv is not supported; supported: gemm",
        ),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "awq with version gemv is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {}}}, "other settings for some layers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt e5m2 is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "a multiple of 32 columns"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format nvfp4-pack-quantized is not supported"),
        (compressed("pack-quantized", num_bits=2, strategy="group"), "num_bits 2 is not supported; supported: 4, 8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_what_is_not_supported_is_named_before_any_weight_is_read(
    llama: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    content = {**json.loads((llama / "config.json").read_text()), "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(TriptychError, match=said):
        load_model_info(str(tmp_path))


def test_a_config_and_weights_that_disagree_are_an_error(llama: Path, tmp_path: Path) -> None:
    exact = quantise_folder(llama, tmp_path / "model", FORMATS["awq"][0], awq, ())
    info = load_model_info(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"--quantization int8 needs plain weights.*quantised \(awq\)"):
        check_quantised(info, read_index(info.folder), as_int8=True)
    edit_json(exact / "config.json", lambda content: {**content, "quantization_config": FORMATS["awq"][0]})
    with pytest.raises(CheckpointError, match=r"has a quantization_config .*but the weights are plain: remove it"):
        decoder_of(exact)
    edit_json(tmp_path / "model" / "config.json", lambda content: {**content, "quantization_config": None})
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config that says how"):
        decoder_of(tmp_path / "model")


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("qzeros", None, "has no qzeros"),
        ("scales", lambda array: array[:, 8:], "scales and zero points of shapes"),
        ("qweight", lambda array: array.astype("float32"), "packed codes of float32, expected int32"),
    ],
)
def test_damaged_layers_are_named(
    llama: Path, tmp_path: Path, role: str, change: Callable[[Array], Array] | None, said: str
) -> None:
    def pack(base: str, weight: Array) -> tuple[Tensors, Array]:
        tensors, values = awq(base, weight)
        damaged = tensors.pop(f"{base}.{role}")
        return (tensors if change is None else {**tensors, f"{base}.{role}": change(damaged)}), values

    quantise_folder(llama, tmp_path / "model", FORMATS["awq"][0], pack, ())
    with pytest.raises(CheckpointError, match=rf"layer layers\.0\.self_attn\.q_proj.*{said}"):
        decoder_of(tmp_path / "model")


@pytest.mark.parametrize("name", ["plain", "awq", "fp8"])
def test_weights_of_other_shapes_than_the_models_are_named(llama: Path, tmp_path: Path, name: str) -> None:
    if name == "plain":
        shutil.copytree(llama, tmp_path / "model")
    else:
        quantise_folder(llama, tmp_path / "model", *FORMATS[name], ())
    other = {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }  # as many rows of queries, keys, values
    edit_json(tmp_path / "model" / "config.json", lambda content: {**content, **other})
    info = load_model_info(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight have shapes \[\(64, 64\)\], the model needs \(64, 96\)"):
        load_decoder(info, CPU, torch.float32, as_int8=name == "plain")


def test_quantised_encoders_are_refused(qwen2_5_vl: Path, tmp_path: Path) -> None:
    def pack(base: str, weight: Array) -> tuple[Tensors, Array]:
        return fp8(base, weight, per_row=True)

    quantise_folder(qwen2_5_vl, tmp_path / "model", FORMATS["fp8"][0], pack, ("language_model",))
    with pytest.raises(CheckpointError, match="only the linear layers of decoders may be quantised"):
        load_encoder(load_model_info(str(tmp_path / "model")), CPU, torch.float32)


def test_a_decoder_beside_a_plain_encoder_is_quantised(
    qwen2_5_vl: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    exact = quantise_folder(qwen2_5_vl, tmp_path / "model", FORMATS["awq"][0], awq, ("visual",))
    load_encoder(load_model_info(str(tmp_path / "model")), CPU, torch.float32)
    positions = torch.arange(len(input_ids)).expand(3, -1)
    got, expected = (logits_of(decoder_of(folder), input_ids, positions) for folder in (tmp_path / "model", exact))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
