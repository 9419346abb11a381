"""Payloads of transports: bytes in host memory, or memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, eq=False)
class DeviceBuffer:
    """`nbytes` of a GPU's memory at `pointer`, for copies only: this package knows no tensor library.

    The bytes are written: no stream still works on the memory. `owner` keeps the memory for the buffer's lifetime.
    """

    pointer: int
    nbytes: int
    owner: Any = field(default=None, repr=False)
    _to_host: Callable[[], memoryview] | None = field(default=None, repr=False)

    def to_host(self) -> memoryview:
        """Return the bytes in host memory, for transports without GPU support. Blocks until the copy ends: call in a
        thread. Raises NotImplementedError for a received buffer."""
        if self._to_host is None:
            raise NotImplementedError("a received buffer is not sent on")
        return self._to_host()

    def release(self) -> None:
        """Do nothing, for symmetry with memoryview: this buffer counts no views."""


Payload: TypeAlias = memoryview | DeviceBuffer
