"""Compare messages that have travelled: their deadlines are told as what is left, and differ by the time it took."""

from __future__ import annotations

from typing import TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)


def timeless(message: M) -> M:
    """The message with its deadline, if it has one, at 0."""
    return msgspec.structs.replace(message, deadline_s=0.0) if hasattr(message, "deadline_s") else message
