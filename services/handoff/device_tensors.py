"""Tensors of a GPU on their way out of this process and into it, copied beside the engine's stream.

    out   Outgoing        outputs wait on the device for their way out, as far as there is room for them
          payload_of      the tensor where it is (cuda), or its copy in pinned host memory (all other transports)
    in    DeviceReceiveBuffers   from another process's GPU or the host's memory into a tensor that the engine keeps

Threads wait for the copies, never the engine's. What comes in is copied by `CudaRuntime`, and so can be tested without
a GPU; none of it has run on one yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch

from broker.handoff.sender import Key
from broker.transports.base import ReceivedTensor
from broker.transports.cuda.library import CudaLibrary
from broker.transports.cuda.runtime import CudaError, CudaRuntime
from broker.transports.payload import DeviceBuffer, Payload
from broker.transports.shm.push_target import PushedTensor, PushTarget
from common.config import Device
from common.errors import TriptychError
from common.messages import TensorHeader
from engine.device.choice import DTYPES, choose_device
from services.handoff.tensor_bytes import bytes_of


def open_cuda(device: Device) -> CudaRuntime | None:
    """CUDA for the tensors of a worker whose engine computes there; None for one on a CPU.

    Raises TriptychError("invalid_request") where CUDA was asked for and cannot be had.
    """
    chosen = choose_device(device)
    if chosen.type != "cuda":
        return None
    try:
        return CudaLibrary(torch.cuda.current_device())
    except CudaError as error:
        raise TriptychError("invalid_request", f"device cuda: {error}", "device") from error


class Outgoing:
    """Outputs of an encoder between its forward pass and their receipt, no more than `limit_bytes` of them on the GPU.

    Receivers that are slow would fill it otherwise: what finds no room goes to host memory, and from there to others.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[weakref.ref[torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in one piece and complete, on the device as long as there is room. Called on the thread whose
        stream has computed them, once it has."""
        whole = tensor.detach()
        if whole.device.type == "cpu":
            return whole.contiguous()
        if self._kept_bytes() + whole.nbytes > self._limit_bytes:
            return _pinned(whole)
        self._kept.append(weakref.ref(whole))
        return whole

    def _kept_bytes(self) -> int:
        alive = [(reference, tensor.nbytes) for reference in self._kept if (tensor := reference()) is not None]
        self._kept = [reference for reference, _ in alive]
        return sum(size for _, size in alive)


def payload_of(tensor: torch.Tensor) -> Payload:
    """A tensor in one piece, and complete, as transports take it. Nothing is copied yet; it keeps the tensor."""
    if tensor.device.type == "cpu":
        return bytes_of(tensor)
    return DeviceBuffer(tensor.data_ptr(), tensor.nbytes, tensor, partial(_to_host, tensor))


def _to_host(tensor: torch.Tensor) -> memoryview:
    """The bytes in pinned memory. Blocks."""
    return bytes_of(_pinned(tensor))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A complete tensor in pinned memory. Blocks until it is there, and for nothing else that the device has to do."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = _leaving(tensor.device)
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
        done = stream.record_event()
    done.synchronize()
    return host


@cache
def _leaving(device: torch.device) -> torch.cuda.Stream:
    """The stream by which tensors leave for the host."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def compute_on_own_stream(device: torch.device) -> None:
    """What this thread launches from now on goes to a stream of its own. Others may read its tensors once they are
    complete, and keep them by `keep_for_this_stream`. Nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def keep_for_this_stream(tensor: torch.Tensor) -> None:
    """Called on the engine's thread with what has landed, or what another engine of this process has computed. Its
    memory belongs to the stream that it was made on: once it is given back, it must not be used again before the
    engine's stream has read it for the last time."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class DeviceReceiveBuffers:
    """Brings received tensors to the device of the engine, in the place of `ReceiveBuffers`."""

    def __init__(self, runtime: CudaRuntime, device: torch.device) -> None:
        self._runtime = runtime
        self._device = device
        self._stream = runtime.make_stream()
        self._copying = ThreadPoolExecutor(1, "landing")  # not asyncio's, which others may keep waiting

    def __len__(self) -> int:
        """Nothing is prepared."""
        return 0

    def prepare(self, key: Key, sender: str, shape: Sequence[int], dtype: str) -> None:
        """Nothing: torch has memory of a GPU at hand."""

    def expect(self, key: Key, given: PushTarget) -> bool:
        """Nothing is made ready: the tensor is copied to the device when it has come."""
        return True

    def keep(self, key: Key, received: PushedTensor) -> None:
        """Nothing of the host's memory is kept: `take` copies it."""

    def drop(self, key: Key) -> None:
        """Nothing was prepared."""

    async def take(self, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        """The tensor, complete, on the device; or what is wrong with its bytes. What was received may be released."""
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
        """Run what blocks in a thread of this object's, which ends with it."""
        return await asyncio.get_running_loop().run_in_executor(self._copying, function, *arguments)

    def _make_host(self, header: TensorHeader) -> torch.Tensor:
        pinned = self._device.type == "cuda"
        return torch.empty(tuple(header.shape), dtype=DTYPES[header.dtype], pin_memory=pinned)

    def _copy(self, header: TensorHeader, source: int, num_bytes: int) -> torch.Tensor:
        """Blocks until the copy is done."""
        with self._allocating():
            tensor = torch.empty(tuple(header.shape), dtype=DTYPES[header.dtype], device=self._device)
        if num_bytes:
            self._runtime.copy(tensor.data_ptr(), source, num_bytes, self._stream)
            self._runtime.synchronize(self._stream)
        return tensor

    def _allocating(self) -> contextlib.AbstractContextManager[object]:
        """Within, torch takes memory for this stream. Memory that the engine's stream has given back may still be read
        by what that stream has to do, which this one does not wait for."""
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        stream = torch.cuda.ExternalStream(self._stream, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)
