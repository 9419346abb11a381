"""Memory for received tensors: host memory prepared at the grant, or GPU memory allocated at arrival.

The first touch of a fresh page takes several times as long as the copy of a page. So a thread touches the pages of host
memory after the grant, while the sender computes, and those of pushed memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from broker.handoff.sender import Key
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.payload import DeviceBuffer
from broker.transports.received import Bytes, PushedTensor, PushTarget, ReceivedTensor
from broker.transports.shm.push_buffer import is_worth_it
from common.messages import TensorHeader
from engine.device.choice import DTYPES
from services.handoff.payloads import bytes_of

TOUCHING_THREADS: Final = 2
"""Not asyncio's threads, which others may occupy. Two: a large tensor does not hold up a small tensor."""
MAX_PUSHERS: Final = 1000
MAX_KEPT: Final = 16_384
"""Limit of tensors in pushed memory, each a mapping of its own; the system allows four times as many."""


@dataclass(frozen=True)
class _OwnMemory:
    """Memory of this process: the tensor is copied in, once all pages are touched."""

    tensor: torch.Tensor
    touched: asyncio.Future[None]


@dataclass(frozen=True)
class _PushedMemory:
    """Memory pushed by the sender in `target`; `tensor` arrives and stays in this memory."""

    tensor: torch.Tensor
    target: PushTarget
    memory: Bytes
    """Memory of `target`, which forgets the memory once the tensor has arrived."""


class ReceiveBuffers:
    """One tensor in host memory per awaited handoff, counted against the engine's budget."""

    def __init__(self) -> None:
        self._buffers: dict[Key, _OwnMemory | _PushedMemory | None] = {}
        """By awaited handoff. None: allocated at arrival, for memory will be pushed, or pushed memory not be kept."""
        self._pushers: set[str] = set()  # senders whose last large tensor came in pushed memory
        self._kept: set[int] = set()  # addresses of pushed memory in use
        self._touching = ThreadPoolExecutor(TOUCHING_THREADS, "receive")  # threads end with this object

    def __len__(self) -> int:
        return len(self._buffers)

    def prepare(self, key: Key, sender: str, shape: Sequence[int], dtype: str) -> None:
        """Allocate memory for a granted tensor, unless allocated before or about to be pushed."""
        if key not in self._buffers:
            is_pushed = sender in self._pushers and is_worth_it(math.prod(shape) * DTYPES[dtype].itemsize)
            self._buffers[key] = None if is_pushed else self._make(shape, dtype)

    def expect(self, key: Key, target: PushTarget) -> bool:
        """Accept memory pushed by the sender of an awaited tensor. False for an unknown tensor."""
        if key not in self._buffers:
            return False
        if len(self._pushers) >= MAX_PUSHERS:
            self._pushers.clear()
        self._pushers.add(target.header.sender)
        self.discard(key)
        memory, header = target.memory, target.header
        if memory is None or len(self._kept) >= MAX_KEPT:
            self._buffers[key] = None
            return memory is not None
        self._kept.add(memory.ctypes.data)
        weakref.finalize(memory, self._kept.discard, memory.ctypes.data).atexit = False
        tensor = torch.from_numpy(memory).view(DTYPES[header.dtype]).view(header.shape)
        asyncio.get_running_loop().run_in_executor(self._touching, target.touch)
        self._buffers[key] = _PushedMemory(tensor, target, memory)
        return True

    async def receive(self, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        """Return a received tensor, or the fault of its bytes. It stays in pushed memory, and is copied to any other.

        After a fault the tensor is awaited again. A tensor without prepared memory, perhaps repeated, gets memory.
        """
        header, buffer = received.header, self._buffers.get(key)
        pushed = received.memory if isinstance(received, PushedTensor) else None
        if isinstance(buffer, _PushedMemory) and buffer.memory is pushed:
            fault = await received.verify()
            if fault is not None:
                return fault
            del self._buffers[key]
            return buffer.tensor
        self._pushers.discard(header.sender)
        if not isinstance(buffer, _OwnMemory):
            self.discard(key)  # the tensor did not come in pushed memory
            buffer = self._make(header.shape, header.dtype)
        await buffer.touched
        fault = await received.copy_into(bytes_of(buffer.tensor))
        if fault is not None:
            return fault
        self.discard(key)  # never written again: the engine owns the tensor now
        return buffer.tensor

    def discard(self, key: Key) -> None:
        """Stop to await a tensor. Unknown keys are fine."""
        buffer = self._buffers.pop(key, None)
        if isinstance(buffer, _PushedMemory):
            buffer.target.discard()

    def _make(self, shape: Sequence[int], dtype: str) -> _OwnMemory:
        """Allocate memory, and begin to write to each page: NumPy lets other threads run meanwhile."""
        tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype])
        pages = np.asarray(bytes_of(tensor))[:: mmap.PAGESIZE]
        return _OwnMemory(tensor, asyncio.get_running_loop().run_in_executor(self._touching, pages.fill, 0))


class DeviceReceiveBuffers:
    """Copies received tensors to the device of the engine; replaces `ReceiveBuffers` on a GPU."""

    def __init__(self, runtime: CudaRuntime, device: torch.device) -> None:
        self._runtime = runtime
        self._device = device
        self._stream = runtime.make_stream()
        self._copying = ThreadPoolExecutor(1, "receive")  # not asyncio's threads, which others may occupy

    def __len__(self) -> int:
        """Zero: no buffer is prepared."""
        return 0

    def prepare(self, key: Key, sender: str, shape: Sequence[int], dtype: str) -> None:
        """Do nothing: torch allocates GPU memory quickly."""

    def expect(self, key: Key, target: PushTarget) -> bool:
        """Accept pushed memory: the tensor is copied to the device after its arrival."""
        return True

    def discard(self, key: Key) -> None:
        """Do nothing: no buffer was prepared."""

    async def receive(self, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        """Return the complete tensor on the device, or the fault of its bytes. `received` may be released then."""
        header, data = received.header, received.data
        try:
            if isinstance(data, DeviceBuffer):
                return await self._aside(self._copy, header, data.pointer, data.nbytes)
            host = await self._aside(self._make_host, header)
            fault = await received.copy_into(bytes_of(host))
            if fault is not None:
                return fault
            return await self._aside(self._copy, header, host.data_ptr(), host.nbytes)
        except (CudaError, torch.OutOfMemoryError) as error:
            return f"it could not be copied to the GPU: {error}"

    async def _aside(self, function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
        """Run a blocking function in a thread of this object."""
        return await asyncio.get_running_loop().run_in_executor(self._copying, function, *arguments)

    def _make_host(self, header: TensorHeader) -> torch.Tensor:
        pinned = self._device.type == "cuda"
        return torch.empty(tuple(header.shape), dtype=DTYPES[header.dtype], pin_memory=pinned)

    def _copy(self, header: TensorHeader, source: int, num_bytes: int) -> torch.Tensor:
        """Copy, and block until the copy is done."""
        with self._allocating():
            tensor = torch.empty(tuple(header.shape), dtype=DTYPES[header.dtype], device=self._device)
        if num_bytes:
            self._runtime.copy(tensor.data_ptr(), source, num_bytes, self._stream)
            self._runtime.synchronize(self._stream)
        return tensor

    def _allocating(self) -> contextlib.AbstractContextManager[object]:
        """Let torch allocate for this object's stream: queued work may still read memory freed by the engine's."""
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        stream = torch.cuda.ExternalStream(self._stream, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)
