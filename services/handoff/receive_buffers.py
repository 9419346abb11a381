"""Host memory for granted encoder outputs, ready before the tensors come.

The first touch of a fresh page takes several times as long as the copy of a page, for the system zeroes the page. A
thread touches the pages once memory is granted, while the sender still computes. The same goes for memory that the
sender pushes, in which the tensor stays.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from broker.handoff.sender import Key
from broker.transports.base import ReceivedTensor
from broker.transports.shm.push_buffer import is_worth_it
from broker.transports.shm.push_target import PushedTensor, PushTarget
from broker.transports.shm.segment import Bytes
from engine.device.choice import DTYPES
from services.handoff.tensor_bytes import bytes_of

TOUCHING_THREADS: Final = 2
"""Not asyncio's threads, which others may occupy. Two: a large tensor does not hold up a small tensor."""
MAX_GIVERS: Final = 1000
MAX_KEPT: Final = 16_384
"""Limit of tensors in pushed memory, each a mapping of its own; the system allows four times as many."""


@dataclass(frozen=True)
class _OwnMemory:
    """Memory of this process: the tensor is copied in, once all pages are touched."""

    tensor: torch.Tensor
    touched: asyncio.Future[None]


@dataclass(frozen=True)
class _PushedMemory:
    """Memory pushed by the sender in `target`; `tensor` comes and stays there."""

    tensor: torch.Tensor
    target: PushTarget
    memory: Bytes
    """Memory of `target`, which loses it once the tensor is there."""


class ReceiveBuffers:
    """One tensor in host memory per awaited handoff, counted against the engine's budget."""

    def __init__(self) -> None:
        self._buffers: dict[Key, _OwnMemory | _PushedMemory | None] = {}
        """By awaited handoff. None: memory is allocated at arrival, for the sender is about to push memory, or has
        pushed memory that cannot be kept."""
        self._givers: set[str] = set()  # senders whose last large tensor came in pushed memory
        self._kept: set[int] = set()  # addresses of pushed memory in use
        self._touching = ThreadPoolExecutor(TOUCHING_THREADS, "landing")  # threads end with this object

    def __len__(self) -> int:
        return len(self._buffers)

    def prepare(self, key: Key, sender: str, shape: Sequence[int], dtype: str) -> None:
        """Allocate memory for a granted tensor, unless allocated before or about to be pushed."""
        if key not in self._buffers:
            given = sender in self._givers and is_worth_it(math.prod(shape) * DTYPES[dtype].itemsize)
            self._buffers[key] = None if given else self._make(shape, dtype)

    def expect(self, key: Key, given: PushTarget) -> bool:
        """Accept memory pushed by the sender of an awaited tensor. False for an unknown tensor."""
        if key not in self._buffers:
            return False
        if len(self._givers) >= MAX_GIVERS:
            self._givers.clear()
        self._givers.add(given.header.sender)
        self.discard(key)
        memory, header = given.memory, given.header
        if memory is None or len(self._kept) >= MAX_KEPT:
            self._buffers[key] = None
            return memory is not None
        self._kept.add(memory.ctypes.data)
        weakref.finalize(memory, self._kept.discard, memory.ctypes.data).atexit = False
        tensor = torch.from_numpy(memory).view(DTYPES[header.dtype]).view(header.shape)
        self._touch(given.touch)
        self._buffers[key] = _PushedMemory(tensor, given, memory)
        return True

    async def receive(self, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        """Copy a received tensor to the prepared memory, and check the bytes. Return the tensor, or the fault.

        After a fault the tensor is awaited again. A tensor without prepared memory gets memory, too: it may have come
        before, and the engine decides.
        """
        header = received.header
        self._givers.discard(header.sender)
        buffer = self._buffers.get(key)
        if not isinstance(buffer, _OwnMemory):
            self.discard(key)  # the tensor did not come in pushed memory
            buffer = self._make(header.shape, header.dtype)
        await buffer.touched
        fault = await received.copy_into(bytes_of(buffer.tensor))
        if fault is not None:
            return fault
        self.discard(key)  # never written again: the engine owns the tensor now
        return buffer.tensor

    def keep(self, key: Key, received: PushedTensor) -> torch.Tensor | str | None:
        """Return a tensor received in pushed memory, without a copy, or the fault; None if `receive` must copy."""
        buffer = self._buffers.get(key)
        if not isinstance(buffer, _PushedMemory) or buffer.memory is not received.memory:
            return None
        fault = received.verified()
        if fault is not None:
            return fault
        del self._buffers[key]
        return buffer.tensor

    def discard(self, key: Key) -> None:
        """Stop to await a tensor. Unknown keys are fine."""
        buffer = self._buffers.pop(key, None)
        if isinstance(buffer, _PushedMemory):
            buffer.target.discard()

    def _make(self, shape: Sequence[int], dtype: str) -> _OwnMemory:
        tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype])
        return _OwnMemory(tensor, self._touch(partial(_touch, bytes_of(tensor))))

    def _touch(self, touch: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._touching, touch)


def _touch(memory: memoryview) -> None:
    """Write to every page."""
    np.asarray(memory)[:: mmap.PAGESIZE] = 0  # by NumPy, which lets other threads run meanwhile
