"""8-bit weights made at load: every linear layer, the output head too, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from engine.llm import LLM
from engine.models.base import DecoderModel
from engine.models.layers import Linear
from engine.models.quantised.weight import CodedWeight, pack_pairs, quantise_int8, unpack_pairs
from engine.models.registry import load_decoder
from engine.native import quantised
from tests.engine.models.dense import decoder_of, logits_of
from tests.engine.models.quantised.weights import dequantised

CPU = torch.device("cpu")
DTYPES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-7, 2**-15)}
"""Tolerances relative to the result, and to the sum of the magnitudes that went in: bfloat16 becomes integers."""


def int8_of(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> DecoderModel:
    info = load_model_info(str(folder))
    return load_decoder(info, CPU, dtype, load_format, as_int8=True)[0]  # type: ignore[arg-type]


def linear_layers(model: DecoderModel) -> list[Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Linear)]


def dequantise(model: DecoderModel) -> DecoderModel:
    for layer in linear_layers(model):
        weight: object = layer.weight
        assert isinstance(weight, CodedWeight)
        del layer.weight
        layer.weight = torch.nn.Parameter(dequantised(weight), requires_grad=False)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_5_vl", "whisper"])
def test_all_linear_layers_are_small_and_answer_as_dequantised(
    family: str, input_ids: torch.Tensor, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    positions = torch.arange(len(input_ids)).expand(3, -1) if family == "qwen2_5_vl" else None
    rows = torch.randn(24, decoder_of(folder).spec.hidden_size) if family == "whisper" else None
    small = logits_of(int8_of(folder), input_ids, positions, rows)
    expected = logits_of(dequantise(int8_of(folder)), input_ids, positions, rows)
    torch.testing.assert_close(small, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(small.argmax(-1), expected.argmax(-1))


def test_a_tied_head_is_small_beside_an_exact_embedding(llama: Path) -> None:
    model, plain = int8_of(llama), decoder_of(llama)
    assert plain.lm_head is None
    assert isinstance(model.lm_head, Linear)
    assert isinstance(model.lm_head.weight, CodedWeight)
    assert torch.equal(model.embed_tokens.weight, plain.embed_tokens.weight)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_report_counts_a_byte_for_each_weight(qwen2: Path, load_format: str) -> None:
    info = load_model_info(str(qwen2))
    full = load_decoder(info, CPU, torch.float32)[1]
    model, num_bytes = load_decoder(info, CPU, torch.float32, load_format, as_int8=True)  # type: ignore[arg-type]
    codes = sum(layer.weight.codes.numel() for layer in linear_layers(model))  # type: ignore[union-attr, operator]
    scales = sum(4 * layer.weight.codes.shape[0] for layer in linear_layers(model))  # type: ignore[union-attr, index]
    assert num_bytes == full - 3 * codes + scales


def test_llm_takes_it_and_says_so_in_its_weights(llama: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(20))}
    once, again = (LLM(str(llama), quantization="int8").generate([prompt], params) for _ in range(2))  # type: ignore[list-item]
    assert once[0].outputs[0].token_ids == again[0].outputs[0].token_ids


@torch.inference_mode()
def test_rounding_is_at_most_half_a_step_and_zeros_stay() -> None:
    weight = torch.randn(9, 50) * torch.logspace(-6, 3, 9)[:, None]
    weight[3] = 0
    small = quantise_int8(weight)
    assert (dequantised(small) - weight).abs().le(small.scales * 0.5001).all()
    assert not dequantised(small)[3].any()


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["int8", "int8 with zeros", "int4", "e4m3"]),
    rows=st.integers(1, 70),
    columns=st.integers(1, 21),
    blocks=st.integers(1, 20),
    tail=st.integers(0, 31),
    biased=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
@torch.inference_mode()
def test_the_kernels_multiply_as_pytorch_does(
    kind: str, rows: int, columns: int, blocks: int, tail: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    if quantised.library() is None:
        pytest.skip("the kernels do not run here")
    generator = torch.Generator().manual_seed(seed)
    one_group = kind == "int8" and tail > 0
    size, count = 32 * blocks + (tail if one_group else 0), 1 if one_group else blocks
    scales = torch.rand(columns, count, generator=generator)
    zeros = torch.randint(-8, 8, (columns, count), generator=generator).float() if kind != "e4m3" else None
    if kind == "int8":
        zeros = None
    if kind == "e4m3":
        codes = torch.randn(columns, size, generator=generator).to(torch.float8_e4m3fn)
    elif kind == "int4":
        codes = pack_pairs(torch.randint(0, 16, (columns, size), generator=generator, dtype=torch.uint8))
    else:
        codes = torch.randint(-128, 128, (columns, size), generator=generator).to(torch.int8)
    weight = CodedWeight(codes, scales, zeros, size if one_group else 32)
    x = torch.randn(rows, size + 5, generator=generator).to(dtype)[:, :size]
    bias = torch.randn(columns, generator=generator).to(dtype) if biased else None
    exact = x.double() @ dequantised(weight).double().t() + (0 if bias is None else bias.double())
    bound = float((x.double().abs() @ dequantised(weight).double().abs().t()).max()) + 1e-3
    rtol, atol = DTYPES[dtype]
    torch.testing.assert_close(weight.multiply(x, bias).double(), exact, rtol=rtol, atol=atol * bound)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_nan_and_its_neighbours_stay(value: float) -> None:
    weight, x = quantise_int8(torch.randn(9, 70)), torch.randn(3, 70, dtype=torch.bfloat16)
    expected = weight.multiply(x)
    x[1, 40] = value
    found = weight.multiply(x)
    assert found[1].isnan().all() or not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


def test_an_outlier_does_not_drown_values_of_other_blocks() -> None:
    weight, x = quantise_int8(torch.randn(8, 128)), torch.full((1, 128), 2.0**-10, dtype=torch.bfloat16)
    x[0, 0] = 2.0**15
    codes = weight.codes.clone()
    codes[:, :32] = 0
    rest = CodedWeight(codes, weight.scales, weight.zeros, weight.group)
    torch.testing.assert_close(rest.multiply(x).float(), x.float() @ dequantised(rest).t(), rtol=2**-7, atol=1e-6)


def test_pairs_come_apart_as_they_were_put_together() -> None:
    codes = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)
