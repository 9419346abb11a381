"""Our own kernels on the GPU; small inputs, for compute-sanitizer watches every access of them."""

from __future__ import annotations

import pytest
import torch

from engine.attention.torch_backend import TorchBackend
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = [*needs_gpu, pytest.mark.skipif(DEVICE != "cuda", reason="Triton's kernels run on CUDA alone")]
NUM_BLOCKS, BLOCK_SIZE = 7, 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 80), (3, 96), (5, 32)])
def test_keys_and_values_are_written_into_their_slots_and_nowhere_else(
    heads: int, head_dim: int, slot_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    from engine.attention.paged_write import write_paged

    shape = (2, NUM_BLOCKS, BLOCK_SIZE, heads, head_dim)
    got, expected = (torch.full(shape, 50.0, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)[:9]
    key, value = torch.randn(2, len(slots), 2 * heads, head_dim, device=DEVICE, dtype=dtype)[:, :, ::2]  # with gaps
    write_paged(got, key, value, slots.to(slot_dtype))
    TorchBackend().write(expected, key, value, slots)
    assert torch.equal(got, expected)
