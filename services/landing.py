"""Memory for encoder outputs that have been granted room, ready before they come.

The first touch of a page of fresh memory takes several times as long as the copy of a page, for the system zeroes it.
So it is done once room has been granted, in a thread, while the sender still computes.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from broker.handoff import Key
from broker.transports.base import ReceivedTensor
from engine.device import DTYPES
from services.tensor_bytes import bytes_of

TOUCHING_THREADS: Final = 2
"""Their own: asyncio's are also those of others, who may keep all of them waiting. Two, so that a large tensor does not
hold up a small one."""


@dataclass(frozen=True)
class _Place:
    tensor: torch.Tensor
    touched: asyncio.Future[None]


class Landing:
    """One tensor in host memory per handoff that is waited for; the engine has counted it against its budget."""

    def __init__(self) -> None:
        self._places: dict[Key, _Place] = {}
        self._touching = ThreadPoolExecutor(TOUCHING_THREADS, "landing")  # its threads end with this object

    def __len__(self) -> int:
        return len(self._places)

    def prepare(self, key: Key, shape: Sequence[int], dtype: str) -> None:
        """Room has been granted to a tensor. Nothing happens where there is memory for it already."""
        if key not in self._places:
            self._places[key] = self._make_place(shape, dtype)

    async def take(self, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        """Copy what has come to where it is waited for, and check it on the way: the tensor, or its fault.

        After a fault it is waited for again. One that nothing is prepared for gets memory, too: it may have come
        before, and what becomes of it is the engine's decision.
        """
        header = received.header
        place = self._places.get(key) or self._make_place(header.shape, header.dtype)
        await place.touched
        fault = await received.copy_into(bytes_of(place.tensor))
        if fault is not None:
            return fault
        self.drop(key)  # never written again: from now on it is the engine's
        return place.tensor

    def drop(self, key: Key) -> None:
        """A tensor is not waited for any more. Unknown keys are fine."""
        self._places.pop(key, None)

    def _make_place(self, shape: Sequence[int], dtype: str) -> _Place:
        tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype])
        touched = asyncio.get_running_loop().run_in_executor(self._touching, _touch, bytes_of(tensor))
        return _Place(tensor, touched)


def _touch(memory: memoryview) -> None:
    """Write to every page."""
    np.asarray(memory)[:: mmap.PAGESIZE] = 0  # by NumPy, which lets other threads run meanwhile
