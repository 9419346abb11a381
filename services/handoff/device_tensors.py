"""Tensors of a GPU between processes, copied beside the engine's stream.

    out   Outgoing               outputs wait on the device, within a limit, until they have left
          payload_of             the tensor in place (cuda), or a copy in pinned host memory (all other transports)
    in    DeviceReceiveBuffers   from another process's GPU or host memory into a tensor that the engine keeps

Helper threads wait for copies, never the engine's thread. `CudaRuntime` copies incoming tensors: a fake runtime tests
this without a GPU.
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
    """Open CUDA for the tensors of a worker; None for an engine on a CPU.

    Raises TriptychError("invalid_request") if CUDA is requested and not available.
    """
    chosen = choose_device(device)
    if chosen.type != "cuda":
        return None
    try:
        return CudaLibrary(torch.cuda.current_device())
    except CudaError as error:
        raise TriptychError("invalid_request", f"device cuda: {error}", "device") from error


class Outgoing:
    """Outputs of an encoder between forward pass and receipt, at most `limit_bytes` on the GPU.

    Slow receivers would fill the GPU otherwise: further outputs wait in host memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[weakref.ref[torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values contiguous and complete, on the device within the limit.

        Called on the thread whose stream has computed the tensor, once complete.
        """
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
    """Return a contiguous, complete tensor as a payload for transports. Copies nothing yet; keeps the tensor."""
    if tensor.device.type == "cpu":
        return bytes_of(tensor)
    return DeviceBuffer(tensor.data_ptr(), tensor.nbytes, tensor, partial(_to_host, tensor))


def _to_host(tensor: torch.Tensor) -> memoryview:
    """Return the bytes in pinned memory. Blocks."""
    return bytes_of(_pinned(tensor))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a complete tensor to pinned memory. Blocks for the copy alone, not for other work of the device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = _leaving(tensor.device)
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
        done = stream.record_event()
    done.synchronize()
    return host


@cache
def _leaving(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to the host."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def compute_on_own_stream(device: torch.device) -> None:
    """Set a new stream for all work of this thread. Does nothing on a CPU.

    Other streams may read complete tensors, and keep them by `keep_for_this_stream`.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def keep_for_this_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of a received tensor, or of another engine's tensor. Called on the engine's thread.

    The memory belongs to the stream that made the tensor. Once freed, it must not be reused before the engine's stream
    has read the tensor for the last time.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class DeviceReceiveBuffers:
    """Copies received tensors to the device of the engine; replaces `ReceiveBuffers` on a GPU."""

    def __init__(self, runtime: CudaRuntime, device: torch.device) -> None:
        self._runtime = runtime
        self._device = device
        self._stream = runtime.make_stream()
        self._copying = ThreadPoolExecutor(1, "landing")  # not asyncio's threads, which others may occupy

    def __len__(self) -> int:
        """Zero: no buffer is prepared."""
        return 0

    def prepare(self, key: Key, sender: str, shape: Sequence[int], dtype: str) -> None:
        """Do nothing: torch allocates GPU memory quickly."""

    def expect(self, key: Key, given: PushTarget) -> bool:
        """Accept pushed memory: the tensor is copied to the device after its arrival."""
        return True

    def keep(self, key: Key, received: PushedTensor) -> None:
        """Return None, for host memory is not kept: `receive` copies the tensor."""

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
        """Let torch allocate for this object's stream meanwhile.

        Memory freed by the engine's stream may still be read by queued work, and this stream does not wait for it.
        """
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        stream = torch.cuda.ExternalStream(self._stream, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)
