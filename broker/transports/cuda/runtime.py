"""The few CUDA calls needed for tensors between processes, behind an interface that tests can replace.

Memory of one process is exported once, as a handle; another process opens the handle and copies out of the memory. A
copy is done after a wait for its stream, not before. Pointers and streams are numbers here.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html (cudaIpc...)
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

HANDLE_BYTES: Final = 64


class CudaError(Exception):
    """A call of CUDA has failed; the message has the call's name and CUDA's own words."""


class CudaRuntime(Protocol):
    """A device of this process. Every method raises CudaError, and is safe from any thread."""

    @property
    def device_id(self) -> str:
        """PCI bus id of this GPU: unique on the host, however processes number the devices."""

    @property
    def nixl_memory(self) -> tuple[Literal["DRAM", "VRAM"], int]:
        """NIXL's name for memory of this device: the kind, and the device number in this process."""

    def make_current(self) -> None:
        """Make the device current in the calling thread, for other libraries."""

    def can_read(self, device_id: str) -> bool:
        """Whether this device can read the memory of another: the same device, or a peer visible to this process."""

    def allocate(self, num_bytes: int) -> int:
        """A pointer to new device memory."""

    def free(self, pointer: int) -> None:
        """Free memory made by `allocate`; waits for the device."""

    def export(self, pointer: int) -> bytes:
        """Return the handle of memory made by `allocate`, for other processes."""

    def open(self, handle: bytes) -> int:
        """A pointer to another process's memory."""

    def close(self, pointer: int) -> None:
        """Close memory opened by `open`."""

    def make_stream(self) -> int:
        """Make a stream without waits for other streams, the default stream included."""

    def destroy_stream(self, stream: int) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Begin to copy, between devices or a device and the host."""

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has done all work queued so far; blocks the caller, and no other stream."""
