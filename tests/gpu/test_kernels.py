"""Our own kernels on the GPU against PyTorch's compositions, with new random inputs each time; SEED makes the same ones
again. They are small, for compute-sanitizer watches every access of them.

    TRITON_INTERPRET=1 TEST_DEVICE=cpu python -m pytest tests/gpu/test_kernels.py      in Triton's interpreter
"""

from __future__ import annotations

import os
import secrets
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.torch_backend import TorchBackend
from engine.models import layers
from engine.models.base import AttentionContext
from engine.models.config import TextConfig
from engine.models.llama import LlamaLayer
from tests.gpu.device import DEVICE, needs_gpu

pytest.importorskip("triton", reason="Triton is not installed; PyTorch for CUDA brings it")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(DEVICE != "cuda" and not INTERPRETED, reason="Triton's kernels run on CUDA, or interpreted"),
]
SEED = int(os.environ.get("SEED") or secrets.randbits(31))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_BLOCKS, BLOCK_SIZE = 7, 4
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(SEED)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_rounded(got: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of some, where sums or exponentials differ in float32. For float32 itself these are
    some bits: Triton divides and takes exponentials on a GPU to two units of the last place each."""
    assert got.dtype == expected.dtype
    precision = torch.finfo(got.dtype).eps * (8 if got.dtype == torch.float32 else 1)
    torch.testing.assert_close(got, expected, rtol=2 * precision, atol=8 * precision, msg=lambda m: f"{m}\nSEED={SEED}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 80), (3, 96), (5, 32)])
def test_keys_and_values_are_written_into_their_slots_and_nowhere_else(
    heads: int, head_dim: int, slot_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    from engine.attention.flashinfer.paged_write import write_paged

    shape = (2, NUM_BLOCKS, BLOCK_SIZE, heads, head_dim)
    got, expected = (torch.full(shape, 50.0, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)[:9]
    key, value = random(2, len(slots), 2 * heads, head_dim, dtype=dtype)[:, :, ::2]  # with gaps
    write_paged(got, key, value, slots.to(slot_dtype))
    TorchBackend().write(expected, key, value, slots)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 200), (2, 2048)])
def test_a_sum_is_kept_and_normed(rows: int, size: int, dtype: torch.dtype) -> None:
    from engine.native import fused

    hidden, added, weight = (random(*shape, dtype=dtype) for shape in ((rows, size), (rows, size), (size,)))
    total = hidden + added
    assert_rounded(fused.add_rms_norm(hidden, None, weight, EPS), F.rms_norm(hidden, (size,), weight, EPS))
    assert_rounded(fused.add_rms_norm(hidden, added, weight, EPS), F.rms_norm(total, (size,), weight, EPS))
    if INTERPRETED:  # which cuts bfloat16 off instead of rounding it
        assert_rounded(hidden, total)
    else:
        assert torch.equal(hidden, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_within_wider_rows_are_normed(dtype: torch.dtype) -> None:
    from engine.native import fused

    qkv, weight = random(3, 7, 48, dtype=dtype), random(48, dtype=dtype)
    for heads in (qkv[:, :4], qkv[:, 4:6]):
        assert_rounded(fused.add_rms_norm(heads, None, weight, EPS), F.rms_norm(heads, (48,), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 1500), (2, 2048)])
def test_an_activation_gates(rows: int, size: int, dtype: torch.dtype) -> None:
    from engine.native import fused

    gate, up = (random(rows, size, dtype=dtype) * 8 for _ in range(2))
    assert_rounded(fused.silu_mul(torch.cat((gate, up), -1)), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (5, 80), (18, 128), (35, 64)])
def test_heads_are_rotated_and_nothing_beside_them(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    from engine.native import fused

    qkv = random(3, heads + 2, head_dim, dtype=dtype)
    angles = torch.rand(3, 1, head_dim // 2, device=DEVICE) * 100
    cosines = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sines = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    turned, beside = layers.rotate(qkv[:, :heads].clone(), cosines, sines), qkv[:, heads:].clone()
    fused.rotate(qkv[:, :heads], cosines, sines)
    assert_rounded(qkv[:, :heads], turned)
    assert torch.equal(qkv[:, heads:], beside)


class _Nothing:
    """Attention that gives back the queries, and all rows."""

    def select_read(self, x: Tensor) -> Tensor:
        return x

    def self_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        return query + key.mean() + value.mean()


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.inference_mode()
def test_layers_of_a_decoder_compute_the_same_with_them(monkeypatch: pytest.MonkeyPatch, qk_norm: bool) -> None:
    from engine.native import fused

    config = TextConfig(
        vocab_size=8,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=EPS,
        max_position_embeddings=64,
        rope={"rope_type": "default", "rope_theta": 1e4},
        mrope_section=None,
        mrope_interleaved=False,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=qk_norm,
        windows=(None, None),
        tied=True,
    )
    stack = [LlamaLayer(config, index).to(DEVICE) for index in range(config.num_layers)]
    for parameter in (parameter for layer in stack for parameter in layer.parameters()):
        parameter.copy_(torch.randn(parameter.shape) / 4)
    embeddings, positions = random(5, config.hidden_size, dtype=torch.float32), torch.arange(5, device=DEVICE)

    def run() -> Tensor:
        rotation = layers.Rotary(config)(positions, torch.float32)
        hidden, residual = embeddings, None
        for layer in stack:
            hidden, residual = layer(hidden, residual, rotation, cast(AttentionContext, _Nothing()))
        return hidden + residual

    def run_with(kernels: object) -> Tensor:
        monkeypatch.setattr(layers, "kernels_for", lambda _: kernels)
        return run()

    before = embeddings.clone()
    expected = run_with(None)
    torch.testing.assert_close(run_with(fused), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(embeddings, before)
