"""The few CUDA calls needed for tensors between processes: its runtime library (12 or 13), by ctypes.

Memory of one process is exported once, as a handle; another process opens the handle and copies out of the memory. A
copy is done after a wait for its stream, not before. Pointers and streams are numbers here. It has run on one GPU.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html (cudaIpc...)
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, Final, Literal

HANDLE_BYTES: Final = 64
_SONAMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_NON_BLOCKING: Final = 1  # cudaStreamNonBlocking
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_COPY_DEFAULT: Final = 4  # cudaMemcpyDefault: the addresses say what is where
_BUS_ID_BYTES: Final = 32


class CudaError(Exception):
    """A call of CUDA has failed; the message has the call's name and CUDA's own words."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaRuntime:
    """A device of this process. Every method raises CudaError, and is safe from any thread."""

    def __init__(self, device: int = 0) -> None:
        """Use device `device`, in this process's numbering. Raises CudaError without the library or such a device."""
        self._device = device
        self._library = _load()
        self._library.cudaGetErrorString.restype = c_char_p
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._call("cudaDeviceGetPCIBusId", bus_id, c_int(_BUS_ID_BYTES), c_int(device))
        self.device_id = bus_id.value.decode()
        """PCI bus id of this GPU: unique on the host, however processes number the devices."""
        self.nixl_memory: tuple[Literal["DRAM", "VRAM"], int] = ("VRAM", device)
        """NIXL's name for memory of this device: the kind, and the device number in this process."""

    def make_current(self) -> None:
        """Make the device current in the calling thread, for other libraries."""
        self._call("cudaSetDevice", c_int(self._device))

    def can_read(self, device_id: str) -> bool:
        """Whether this device can read the memory of another: the same device, or a peer visible to this process."""
        other, possible = c_int(), c_int()
        try:
            self._call("cudaDeviceGetByPCIBusId", byref(other), c_char_p(device_id.encode()))
        except CudaError:  # hidden from this process, by CUDA_VISIBLE_DEVICES or a container
            return False
        if other.value == self._device:
            return True
        self._call("cudaDeviceCanAccessPeer", byref(possible), c_int(self._device), other)
        return bool(possible.value)

    def allocate(self, num_bytes: int) -> int:
        """A pointer to new device memory."""
        pointer = c_void_p()
        self._call("cudaMalloc", byref(pointer), c_size_t(num_bytes))
        return _number(pointer)

    def free(self, pointer: int) -> None:
        """Free memory made by `allocate`; waits for the device."""
        self._call("cudaFree", c_void_p(pointer))

    def export(self, pointer: int) -> bytes:
        """Return the handle of memory made by `allocate`, for other processes."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", byref(handle), c_void_p(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """A pointer to another process's memory."""
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle of {len(handle)} bytes; CUDA's have {HANDLE_BYTES}")
        pointer = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(pointer), _Handle.from_buffer_copy(handle), c_uint(_LAZY_PEER_ACCESS))
        return _number(pointer)

    def close(self, pointer: int) -> None:
        """Close memory opened by `open`."""
        self._call("cudaIpcCloseMemHandle", c_void_p(pointer))

    def make_stream(self) -> int:
        """Make a stream without waits for other streams, the default stream included."""
        stream = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(stream), c_uint(_NON_BLOCKING))
        return _number(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", c_void_p(stream))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Begin to copy, between devices or a device and the host."""
        where = c_void_p(target), c_void_p(source), c_size_t(num_bytes)
        self._call("cudaMemcpyAsync", *where, c_int(_COPY_DEFAULT), c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has done all work queued so far; blocks the caller, and no other stream."""
        self._call("cudaStreamSynchronize", c_void_p(stream))

    def _call(self, function: str, *arguments: Any) -> None:
        """Set the thread's current device, then call: setting the device costs next to nothing."""
        for name, given in (("cudaSetDevice", (c_int(self._device),)), (function, arguments)):
            status = getattr(self._library, name)(*given)
            if status != 0:
                self._library.cudaGetLastError()  # else the next caller gets the error, torch for one
                words = self._library.cudaGetErrorString(c_int(status)).decode()
                raise CudaError(f"{name}: {words} (error {status})")


def _number(pointer: c_void_p) -> int:
    assert pointer.value is not None
    return pointer.value


def _load() -> ctypes.CDLL:
    """Load the library that torch has loaded, if any, or the system's by name, else one in NVIDIA's packages."""
    names, reasons, found = list(_SONAMES), [], importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        names += [str(path) for path in sorted(Path(folder).glob("*/lib/libcudart.so.*"), reverse=True)]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise CudaError(f"no CUDA runtime library: {'; '.join(reasons)}")
