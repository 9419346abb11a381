"""CUDA's runtime library (12 or 13), by ctypes: the library already loaded by torch, if any. It has run on one GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, Final, Literal

from broker.transports.cuda.runtime import HANDLE_BYTES, CudaError

_SONAMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_NON_BLOCKING: Final = 1  # cudaStreamNonBlocking
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_COPY_DEFAULT: Final = 4  # cudaMemcpyDefault: the addresses say what is where
_BUS_ID_BYTES: Final = 32


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaLibrary:
    """See broker.transports.cuda.runtime.CudaRuntime."""

    def __init__(self, device: int = 0) -> None:
        """Use device `device`, in this process's numbering. Raises CudaError without a library or such a device."""
        self._device = device
        self._library = _load()
        self._library.cudaGetErrorString.restype = c_char_p
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._call("cudaDeviceGetPCIBusId", bus_id, c_int(_BUS_ID_BYTES), c_int(device))
        self.device_id = bus_id.value.decode()
        self.nixl_memory: tuple[Literal["DRAM", "VRAM"], int] = ("VRAM", device)

    def make_current(self) -> None:
        self._call("cudaSetDevice", c_int(self._device))

    def can_read(self, device_id: str) -> bool:
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
        pointer = c_void_p()
        self._call("cudaMalloc", byref(pointer), c_size_t(num_bytes))
        return _number(pointer)

    def free(self, pointer: int) -> None:
        self._call("cudaFree", c_void_p(pointer))

    def export(self, pointer: int) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", byref(handle), c_void_p(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle of {len(handle)} bytes; CUDA's have {HANDLE_BYTES}")
        pointer = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(pointer), _Handle.from_buffer_copy(handle), c_uint(_LAZY_PEER_ACCESS))
        return _number(pointer)

    def close(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", c_void_p(pointer))

    def make_stream(self) -> int:
        stream = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(stream), c_uint(_NON_BLOCKING))
        return _number(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", c_void_p(stream))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        where = c_void_p(target), c_void_p(source), c_size_t(num_bytes)
        self._call("cudaMemcpyAsync", *where, c_int(_COPY_DEFAULT), c_void_p(stream))

    def synchronize(self, stream: int) -> None:
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
    """Load the loaded or the system's library by name, else a library in NVIDIA's packages."""
    names, reasons, found = list(_SONAMES), [], importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        names += [str(path) for path in sorted(Path(folder).glob("*/lib/libcudart.so.*"), reverse=True)]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise CudaError(f"no CUDA runtime library: {'; '.join(reasons)}")
