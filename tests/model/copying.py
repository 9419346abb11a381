"""Copies of worlds, by pickling: several times as fast as `copy.deepcopy`, and copies are most of an exploration."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def copy_sharing(value: T, shared: Iterable[object]) -> T:
    """A deep copy; the objects in `shared` are the same in both, as they never change."""
    objects = list(shared)
    buffer = io.BytesIO()
    _Pickler(buffer, {id(one): number for number, one in enumerate(objects)}).dump(value)
    buffer.seek(0)
    copied: T = _Unpickler(buffer, objects).load()
    return copied


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, objects: list[object]) -> None:
        super().__init__(buffer)
        self._objects = objects

    def persistent_load(self, pid: Any) -> object:
        return self._objects[pid]
