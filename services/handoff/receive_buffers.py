"""Memory for encoder outputs that have been granted room, ready before they come.

The first touch of a page of fresh memory takes several times as long as the copy of a page, for the system zeroes it.
So it is done once room has been granted, in a thread, while the sender still computes. The same goes for memory that
the sender has given, in which the tensor stays.
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
from common.messages import TensorHeader
from engine.device.choice import DTYPES
from services.handoff.tensor_bytes import bytes_of

TOUCHING_THREADS: Final = 2
"""Their own: asyncio's are also those of others, who may keep all of them waiting. Two, so that a large tensor does not
hold up a small one."""
MAX_GIVERS: Final = 1000
MAX_KEPT: Final = 16_384
"""Tensors in memory that was given, each of which is a mapping of its own; the system allows four times as many."""


@dataclass(frozen=True)
class _Made:
    """Memory of this process: what comes is copied to it, once it has been touched."""

    tensor: torch.Tensor
    touched: asyncio.Future[None]


@dataclass(frozen=True)
class _Given:
    """Memory that the sender has given in `room`: `tensor` comes, and stays, in it."""

    tensor: torch.Tensor
    room: PushTarget
    memory: Bytes
    """That of the room, which it has no more once the tensor is there."""


class ReceiveBuffers:
    """One tensor in host memory per handoff that is waited for; the engine has counted it against its budget."""

    def __init__(self) -> None:
        self._places: dict[Key, _Made | _Given | None] = {}
        """All that is waited for. None where memory is made when it comes: its sender is about to give some, or has
        given what cannot be kept."""
        self._givers: set[str] = set()  # senders whose last large tensor came in memory that they had given
        self._kept: set[int] = set()  # addresses of memory that was given and is in use
        self._touching = ThreadPoolExecutor(TOUCHING_THREADS, "landing")  # its threads end with this object

    def __len__(self) -> int:
        return len(self._places)

    def prepare(self, key: Key, sender: str, shape: Sequence[int], dtype: str) -> None:
        """Room has been granted to a tensor. Nothing happens where there is memory for it already.

        Where its sender is about to give some, none is made.
        """
        if key not in self._places:
            given = sender in self._givers and is_worth_it(math.prod(shape) * DTYPES[dtype].itemsize)
            self._places[key] = None if given else self._make(shape, dtype)

    def expect(self, key: Key, given: PushTarget) -> bool:
        """The sender of a tensor has given the memory for it. False where none is waited for."""
        if key not in self._places:
            return False
        if len(self._givers) >= MAX_GIVERS:
            self._givers.clear()
        self._givers.add(given.header.sender)
        self.drop(key)
        memory, header = given.memory, given.header
        if memory is None or len(self._kept) >= MAX_KEPT:
            self._places[key] = None
            return memory is not None
        self._kept.add(memory.ctypes.data)
        weakref.finalize(memory, self._kept.discard, memory.ctypes.data).atexit = False
        tensor = torch.from_numpy(memory).view(DTYPES[header.dtype]).view(header.shape)
        self._touch(given.touch)
        self._places[key] = _Given(tensor, given, memory)
        return True

    async def take(self, key: Key, received: ReceivedTensor) -> torch.Tensor | str:
        """Copy what has come to where it is waited for, and check it on the way: the tensor, or its fault.

        After a fault it is waited for again. One that nothing is prepared for gets memory, too: it may have come
        before, and what becomes of it is the engine's decision.
        """
        header = received.header
        self._givers.discard(header.sender)
        tensor = await self._ready(key, header)
        fault = await received.copy_into(bytes_of(tensor))
        if fault is not None:
            return fault
        self.drop(key)  # never written again: from now on it is the engine's
        return tensor

    def keep(self, key: Key, received: PushedTensor) -> torch.Tensor | str | None:
        """What has come in memory that was given for it, where it lies; or its fault, as `take`; None where `take` has
        to copy it."""
        place = self._places.get(key)
        if not isinstance(place, _Given) or place.memory is not received.memory:
            return None
        fault = received.verified()
        if fault is not None:
            return fault
        del self._places[key]
        return place.tensor

    def drop(self, key: Key) -> None:
        """A tensor is not waited for any more. Unknown keys are fine."""
        place = self._places.pop(key, None)
        if isinstance(place, _Given):
            place.room.discard()

    async def _ready(self, key: Key, header: TensorHeader) -> torch.Tensor:
        """Memory to copy a tensor to."""
        place = self._places.get(key)
        if not isinstance(place, _Made):
            self.drop(key)  # nothing comes in memory that was given
            place = self._make(header.shape, header.dtype)
        await place.touched
        return place.tensor

    def _make(self, shape: Sequence[int], dtype: str) -> _Made:
        tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype])
        return _Made(tensor, self._touch(partial(_touch, bytes_of(tensor))))

    def _touch(self, touch: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._touching, touch)


def _touch(memory: memoryview) -> None:
    """Write to every page."""
    np.asarray(memory)[:: mmap.PAGESIZE] = 0  # by NumPy, which lets other threads run meanwhile
