"""Our Triton kernel writes keys and values where index_copy_ does: on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from engine.attention.torch_backend import TorchBackend

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "dtype"), [(80, 3, torch.float16), (96, 2, torch.float32)])
def test_keys_and_values_are_written_into_their_slots(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, num_kv_heads: int, dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is first imported
    from engine.attention.paged_write import write_paged

    expected = torch.zeros(2, 7, 4, num_kv_heads, head_dim, dtype=dtype, device=device)
    got = expected.clone()
    qkv = torch.randn(5, 3 * num_kv_heads, head_dim, device=device).to(dtype)
    key, value = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]  # as fused projections leave them
    slots = torch.tensor([9, 22, 4, 27, 0], dtype=slot_dtype, device=device)
    TorchBackend().write(expected, key, value, slots)
    write_paged(got, key, value, slots)
    assert torch.equal(got, expected)
    assert expected.any()
