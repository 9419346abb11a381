"""How a fixed sequence of device work is recorded once and done again: on a GPU by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

WARM_UP_RUNS: Final = 2
"""Before capturing: libraries choose kernels and take their workspaces in the first run."""


class Recorder(Protocol):
    """Make work with fixed input and output addresses repeatable."""

    @property
    def size_bytes(self) -> int:
        """The memory that all recordings hold so far."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that repeats `work` on the present inputs and returns its output. Calls `work` at least
        once. An output is valid until another recording runs."""


class CudaRecorder:
    """CUDA graphs with a shared memory pool: a single graph runs at a time, at the same addresses.

    Work is warmed up and captured on a stream of its own, as `torch.cuda.graph` asks for, and replayed on the current
    one. It must not wait for the device, nor copy from pageable memory: CUDA refuses to capture that.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._device, self._reserved = device, torch.cuda.memory_reserved(device)

    @property
    def size_bytes(self) -> int:
        torch.cuda.empty_cache()  # of what a recording needed only while it was made
        return torch.cuda.memory_reserved(self._device) - self._reserved

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        # Around it, for a capture that CUDA has broken off leaves its stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
