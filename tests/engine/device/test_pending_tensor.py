"""Tensors that a device still computes: who waits for them. Stream and event are stand-ins that note what happens."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine.device.pending_tensor import PendingTensor


class Cuda(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_the_thread_that_computes_marks_the_end_and_whoever_wants_the_tensor_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = list[str]()

    class Stream:
        def record_event(self) -> Any:
            log.append("the end is marked")
            return self

        def synchronize(self) -> None:
            log.append("the host waits")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    tensor = cast(Cuda, torch.arange(3.0).as_subclass(Cuda))
    pending = PendingTensor(tensor)
    assert log == ["the end is marked"]
    assert (pending.is_cuda, pending.nbytes) == (True, 12)
    assert pending.wait() is tensor
    assert log == ["the end is marked", "the host waits"]


def test_on_a_cpu_everything_is_computed_at_once() -> None:
    tensor = torch.arange(3.0)
    pending = PendingTensor(tensor)
    assert not pending.is_cuda
    assert pending.wait() is tensor
