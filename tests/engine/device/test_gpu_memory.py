"""What a worker may take of a GPU that others use, too."""

from __future__ import annotations

import pytest
import torch

from common.config import EngineConfig
from common.errors import TriptychError
from common.process.gpu_memory import PROCESS_BYTES
from engine.device.gpu_memory import GpuMemory, cuda_budget
from engine.device.memory import memory_budget

GIB = 2**30


def gpu(reserved: int = 0, others: int = 0) -> GpuMemory:
    return GpuMemory(80 * GIB, 80 * GIB - reserved - PROCESS_BYTES - others, reserved)


def test_the_budget_is_the_share_less_what_this_process_has() -> None:
    assert cuda_budget(EngineConfig(), gpu(reserved=6 * GIB)) == int(0.9 * 80 * GIB) - 6 * GIB - PROCESS_BYTES


def test_what_a_process_takes_beside_torch_can_be_told() -> None:
    """As for tensors that go between GPUs by NIXL, or for MPS, where processes share a context."""
    for size in (0, GIB):
        budget = cuda_budget(EngineConfig(process_bytes=size), gpu(reserved=6 * GIB))
        assert budget == int(0.9 * 80 * GIB) - 6 * GIB - size


@pytest.mark.parametrize("others", [0, 4 * GIB, 30 * GIB])
def test_what_others_hold_changes_nothing_as_long_as_the_share_is_free(others: int) -> None:
    """So that it does not matter who starts first."""
    share = EngineConfig(memory_fraction=0.5)
    assert cuda_budget(share, gpu(6 * GIB, others)) == 40 * GIB - 6 * GIB - PROCESS_BYTES


def test_workers_with_shares_of_nine_tenths_fit_in_any_order() -> None:
    shares = [0.05, 0.25, 0.6]
    for order in (shares, shares[::-1]):
        taken = 0
        for share in order:
            taken += cuda_budget(EngineConfig(memory_fraction=share), gpu(others=taken)) + PROCESS_BYTES
        assert taken <= 0.9 * 80 * GIB


def test_a_share_that_others_have_taken_is_an_error_with_the_numbers() -> None:
    with pytest.raises(TriptychError) as caught:
        cuda_budget(EngineConfig(memory_fraction=0.6), gpu(reserved=GIB, others=50 * GIB))
    message = caught.value.info.message
    for part in ("80 GiB", "may take 0.6", "28.2 GiB are free", "hold 50 GiB", "here at most 0.37"):
        assert part in message
    allowed = EngineConfig(memory_fraction=0.37)
    assert cuda_budget(allowed, gpu(reserved=GIB, others=50 * GIB)) > 0, "what the message says works"


def test_a_share_smaller_than_what_is_taken_leaves_nothing() -> None:
    assert cuda_budget(EngineConfig(memory_fraction=0.01), gpu(reserved=GIB)) == 0


def test_the_devices_own_figures_are_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    budget = memory_budget(EngineConfig(), torch.device("cuda"))
    assert budget == int(0.9 * 80 * GIB) - 2 * GIB - PROCESS_BYTES
