"""Calls of kernels and of PyTorch, kept once and made again: for a CPU what a CUDA graph is for a GPU.

Python takes as long to run the layers of a small decoder as a CPU takes to multiply. Replayed, a run of kernel calls is
one call of C (`calls.h`). Meanwhile Python's lock is free for the other threads of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.native.build import load_kernels, loaded

_aten = torch.ops.aten
_ALLOCATIONS: Final = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class CallRecorder:
    """A `Recorder` for a CPU with the kernels.

    A tensor of `work` has the memory of one that is gone, if kernels alone used it, or of an earlier recording: one
    recording runs at a time.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if not self._memory:
            work()  # which loads the libraries that it calls
        tape = _Tape(self._memory)
        return partial(tape.replay, tape.keep(work))


class _Tape(TorchDispatchMode):
    """Keeps kernel calls in C, PyTorch's as `steps`, and between these the runs of kernel calls."""

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._lent: list[Any] = [None] * len(memory)  # weak references to the storages there
        self._steps: list[Callable[[], object]] = []
        self._kernels = load_kernels()
        self._kernels.new_calls.restype = ctypes.c_void_p
        self._calls, self._num_calls = ctypes.c_void_p(self._kernels.new_calls()), 0

    def __del__(self) -> None:
        self._kernels.free_calls(self._calls)

    def keep(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the output of `work`. Raises TypeError where a value of a tensor decides what comes next."""
        try:
            for library in loaded.values():
                library.keep_calls(self._calls)
            with self:
                output = work()
        finally:
            for library in loaded.values():
                library.keep_calls(None)
        self._end_run()
        return output

    def replay(self, output: Tensor) -> Tensor:
        for step in self._steps:
            step()
        return output

    def _end_run(self) -> None:
        first, self._num_calls = self._num_calls, self._kernels.num_calls(self._calls)
        if first < self._num_calls:
            self._steps.append(partial(self._kernels.replay_calls, self._calls, first, self._num_calls))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        compute = partial(function, *args, **(kwargs or {}))
        values = compute()
        if not all(isinstance(value, Tensor) for value in tree_leaves(values)):
            raise TypeError(f"a step that depends on a value ({function} gave {values}) is not always the same work")
        changes = function._schema.is_mutable
        if not changes and _storages(values) <= _storages((args, kwargs)):
            return values  # a view
        if not changes:
            values = tree_map(self._place, values)
            compute = partial(_put, compute, tree_leaves(values))
        if function.overloadpacket not in _ALLOCATIONS:
            self._end_run()
            self._steps.append(compute)
        return values

    def _place(self, value: Tensor) -> Tensor:
        """Return the value in memory of its own, which is lent while a tensor shares its storage."""
        memory, lent = self._memory, self._lent
        free = [n for n, storage in enumerate(lent) if storage is None or storage.expired()]
        fitting = [n for n in free if memory[n].nbytes >= value.nbytes]
        if not fitting:
            fitting = [len(memory)]
            memory.append(torch.empty(value.nbytes, dtype=torch.uint8))
            lent.append(None)
        number = min(fitting, key=lambda n: memory[n].nbytes)
        place = torch.frombuffer(memory[number].numpy(), dtype=value.dtype, count=value.numel()).view(value.shape)
        lent[number] = StorageWeakRef(place.untyped_storage())  # type: ignore[no-untyped-call]
        return place.copy_(value)


def _put(compute: Callable[[], Any], places: Sequence[Tensor]) -> None:
    for place, value in zip(places, tree_leaves(compute()), strict=True):
        place.copy_(value)


def _storages(values: Any) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in tree_leaves(values) if isinstance(value, Tensor)}
