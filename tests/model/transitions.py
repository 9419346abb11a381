"""Which changes of state the real state machines have gone through while somebody watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest.mock import patch

Transition = tuple[str, str]


@contextmanager
def watched(kind: type) -> Iterator[set[Transition]]:
    """Meanwhile every change of the attribute `state` of every `kind` is noted, by the names of the states."""
    seen: set[Transition] = set()

    def note(self: object, name: str, value: Any) -> None:
        before = self.__dict__.get("state") if name == "state" else None
        if before is not None and before != value:
            seen.add((_name(before), _name(value)))
        object.__setattr__(self, name, value)

    with patch.object(kind, "__setattr__", note):
        yield seen


def _name(state: Any) -> str:
    return state.name if isinstance(state, Enum) else str(state).upper()
