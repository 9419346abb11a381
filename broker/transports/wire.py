"""Messages of the transports' own: small ones, between the two ends of one connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

M = TypeVar("M")


def make_decode(kind: type[M] | Any) -> Callable[[bytes | memoryview], M]:
    """Decodes messages of `kind`, a type or a union of tagged ones. What it returns raises ValueError on anything
    else, whatever is wrong with it."""
    decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes | memoryview) -> M:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a valid message: {error!s:.500}") from error

    return decode
