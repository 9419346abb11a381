"""Tensors in the broker: keys, messages and commands.

    {cluster}:tensors:{token}          a receiver's list of Passing: a tensor is about to come
    {list}:{sender}:{id}:lease         there for as long as its sender says every moment that it goes on
    {list}:{sender}:{id}:{n}           its bytes, chunk after chunk, at most WINDOW of them at a time
    {list}:{sender}:{id}:taken         what the receiver says of them

Every key lasts for LEASE_S and is renewed by the sender: after any death or loss, no key stays longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, cast

import msgspec
from redis.asyncio import Redis

from broker.transports.base import make_decode
from common.messages import Count, Id, TensorHeader, encode

SCHEME: Final = "redis+list"
CHUNK_BYTES: Final = 4 * 2**20
"""Far below the broker's limit of one value (64 MiB), and others wait a few milliseconds at most behind one."""
WINDOW: Final = 4
"""Chunks that may wait in the broker."""
LEASE_S: Final = 1.5
"""The chunks of a stopped or cut-off sender are gone after so long, also while the broker stands still."""
RENEWAL_S: Final = 0.4
MAX_TIMEOUT_S: Final = 3600.0
DONE, REFUSED, LOST = b"done", b"refused", b"lost"
"""Answers beside the number of the awaited chunk: the tensor is here, is not taken, or was abandoned."""
_LEASE_MS: Final = int(LEASE_S * 1000)
_BLOCK_S: Final = 1.0


class Passing(msgspec.Struct, frozen=True):
    """A tensor of `size_bytes`, sent for `timeout_s` at most. A repeated message asks the receiver for progress."""

    id: Id
    size_bytes: Count
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]
    header: TensorHeader


decode_passing: Final[Callable[[bytes], Passing]] = make_decode(Passing)


def chunk_key(list_key: str, passing: Passing, number: int | str) -> str:
    return f"{list_key}:{passing.header.sender}:{passing.id}:{number}"


def answers_key(list_key: str, passing: Passing) -> str:
    return chunk_key(list_key, passing, "taken")


def lease_key(list_key: str, passing: Passing) -> str:
    return chunk_key(list_key, passing, "lease")


async def announce(redis: Redis, list_key: str, passing: Passing) -> None:
    """Announce a coming tensor, and begin the lease."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(lease_key(list_key, passing), b"", px=_LEASE_MS)
        _append(pipe, list_key, encode(passing))
        await pipe.execute()


async def renew(redis: Redis, list_key: str, passing: Passing, chunks: Iterable[int]) -> bool:
    """Extend the lease, and all keys of these chunks. Return False for an expired lease."""
    keys = [list_key, answers_key(list_key, passing), *(chunk_key(list_key, passing, number) for number in chunks)]
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(lease_key(list_key, passing), b"", px=_LEASE_MS, xx=True)
        for key in keys:
            pipe.pexpire(key, _LEASE_MS)
        return bool((await pipe.execute())[0])


async def is_leased(redis: Redis, list_key: str, passing: Passing) -> bool:
    return bool(await redis.exists(lease_key(list_key, passing)))


async def remove(redis: Redis, list_key: str, passing: Passing, chunks: Iterable[int]) -> None:
    """Remove all content of the broker for these chunks."""
    keys = [chunk_key(list_key, passing, number) for number in chunks]
    async with redis.pipeline(transaction=False) as pipe:
        pipe.lrem(list_key, 0, cast(Any, encode(passing)))
        pipe.delete(lease_key(list_key, passing), answers_key(list_key, passing), *keys)
        await pipe.execute()


async def push(redis: Redis, key: str, value: bytes | memoryview) -> None:
    """Append to a list, which expires LEASE_S from now."""
    async with redis.pipeline(transaction=True) as pipe:
        _append(pipe, key, value)
        await pipe.execute()


async def pop(redis: Redis, key: str) -> bytes | None:
    """Return the first value of a list; None after a second without any."""
    popped: list[bytes] | None = await cast(Any, redis.blpop([key], timeout=_BLOCK_S))
    return None if popped is None else popped[1]


def _append(pipe: Any, key: str, value: bytes | memoryview) -> None:
    pipe.rpush(key, value)
    pipe.pexpire(key, _LEASE_MS)
