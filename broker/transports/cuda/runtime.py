"""The handful of calls of CUDA that tensors between processes need, and what stands for them in tests.

Memory of one process is exported once, as a handle of 64 bytes; another process opens it and copies out of it, over
NVLink, PCIe or within the device. Copies are asynchronous: what a stream has been told is done when the stream has been
waited for, not before. Pointers and streams are numbers here.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html (cudaIpc...)
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

HANDLE_BYTES: Final = 64


class CudaError(Exception):
    """A call of CUDA has failed; the message names it and has CUDA's own words."""


class CudaRuntime(Protocol):
    """One device of this process. Every method raises CudaError; all are safe from any thread."""

    @property
    def device_id(self) -> str:
        """Tells this GPU from every other one of the host, whatever processes number it: its PCI bus id."""

    @property
    def nixl_memory(self) -> tuple[Literal["DRAM", "VRAM"], int]:
        """What NIXL calls memory of this device: its kind, and the device as this process counts them."""

    def make_current(self) -> None:
        """Let other libraries that the calling thread uses find the device: it is a property of the thread."""

    def can_read(self, device_id: str) -> bool:
        """Whether this device can read the memory of that one: it is the same one, or a peer that this process sees."""

    def allocate(self, num_bytes: int) -> int:
        """A pointer to new device memory."""

    def free(self, pointer: int) -> None:
        """Give back what `allocate` has made; waits for the device."""

    def export(self, pointer: int) -> bytes:
        """The handle of what `allocate` has made, for other processes."""

    def open(self, handle: bytes) -> int:
        """A pointer to another process's memory."""

    def close(self, pointer: int) -> None:
        """Let go of what `open` has made."""

    def make_stream(self) -> int:
        """A stream that waits for no other one, the default stream included."""

    def destroy_stream(self, stream: int) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Begin to copy, between devices or a device and the host."""

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has done all that it was told; blocks the caller, and no other stream."""
