"""Small messages between the two ends of one transport connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

M = TypeVar("M")


def make_decode(kind: type[M] | Any) -> Callable[[bytes | memoryview], M]:
    """Return a decoder of messages of `kind`, a type or a union of tagged types. The decoder raises ValueError on any
    other input."""
    decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes | memoryview) -> M:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a valid message: {error!s:.500}") from error

    return decode
