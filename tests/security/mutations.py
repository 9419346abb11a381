"""Hostile bytes: noise, real messages that were damaged, and what MessagePack lets a few bytes claim.

The tests send the same ones each time; `make fuzz` draws a seed and prints it, WIRE_SEED=N sends those of seed N.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Final

import msgpack

SEED: Final = int(os.environ.get("WIRE_SEED") or 20_240_607)
"""Of whoever calls `hostile`."""

HUGE_HEADERS = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xdb\xff\xff\xff\xff",  # a string of 4 GiB
    b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
    b"\xcf" + b"\xff" * 8,  # 2**64 - 1
    b"\xd3\x80" + bytes(7),  # -2**63
    b"\xcb\x7f\xf8" + bytes(6),  # not a number
    b"\xcb\x7f\xf0" + bytes(6),  # infinity
)
NUMBERS = (0, -1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), float("nan"), float("inf"), -1e308, 1e308)


def hostile(rng: random.Random, originals: list[bytes], count: int) -> Iterator[bytes]:
    """So many inputs, by turns of every kind below."""
    kinds: tuple[Callable[[random.Random, bytes, list[bytes]], bytes], ...] = (
        _noise,
        _flipped,
        _cut,
        _spliced,
        _claiming,
        _nested,
        _revalued,
        _revalued,  # twice: it is the kind that gets past the parser
    )
    for number in range(count):
        yield kinds[number % len(kinds)](rng, rng.choice(originals), originals)


def _noise(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    return rng.randbytes(rng.randrange(0, 300))


def _flipped(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    data = bytearray(original)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _cut(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    return original[: rng.randrange(len(original))] + rng.randbytes(rng.randrange(3))


def _spliced(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    other = rng.choice(originals)
    return original[: rng.randrange(len(original))] + other[rng.randrange(len(other)) :]


def _claiming(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    place = rng.randrange(len(original))
    return original[:place] + rng.choice(HUGE_HEADERS) + original[place:]


def _nested(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    place = rng.randrange(len(original))
    return original[:place] + rng.choice((b"\x91", b"\x81\xa1a")) * rng.randrange(100, 5000) + original[place:]


def _revalued(rng: random.Random, original: bytes, originals: list[bytes]) -> bytes:
    return revalued(rng, original)


def revalued(rng: random.Random, original: bytes) -> bytes:
    """A well-formed message in which one value is another: of another type, huge, negative, not finite, very long."""
    message = msgpack.unpackb(original, strict_map_key=False)
    place, key = rng.choice(list(_places(message)))
    place[key] = _other(rng, place[key])
    return bytes(msgpack.packb(message))


def _places(value: object) -> Iterator[tuple[dict[object, object] | list[object], object]]:
    """Every (container, key or index) in a decoded message."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)


def _other(rng: random.Random, value: object) -> object:
    candidates = [
        *NUMBERS,
        None,
        True,
        "",
        "x" * rng.randrange(1000),
        "\ud800".encode("utf-8", "surrogatepass"),
        [rng.choice(NUMBERS)] * rng.randrange(2000),
        {"": value},
        [value],
    ]
    return rng.choice(candidates)


def decoded(decode: Callable[[bytes], object], data: bytes, expected: type[Exception]) -> object:
    """The message, or the expected error; any other exception is the end of the test, and would be that of a worker."""
    try:
        return decode(data)
    except expected as error:
        return error
