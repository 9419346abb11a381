"""Tensors in the broker: keys, messages and commands.

    {cluster}:tensors:{token}          a receiver's list of Passing: a tensor is about to come
    {list}:{sender}:{id}:lease         there for as long as its sender says every moment that it goes on
    {list}:{sender}:{id}:{n}           its bytes, chunk after chunk, at most WINDOW of them at a time
    {list}:{sender}:{id}:taken         what the receiver says of them

Every key lasts for LEASE_S and is renewed by the sender: after any death or loss, no key stays longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import msgspec
from redis.asyncio import Redis

from common.messages import Count, Decode, Id, TensorHeader, encode, make_decode

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


decode_passing: Final[Decode[Passing]] = make_decode(Passing)


@dataclass(frozen=True)
class Parcel:
    """The keys of one tensor in the broker, beside the receiver's list, and the commands of its two ends."""

    redis: Redis
    list_key: str
    passing: Passing

    def key(self, part: int | str) -> str:
        """Return the key of a chunk, of the "lease" or of the answers, which are "taken"."""
        return f"{self.list_key}:{self.passing.header.sender}:{self.passing.id}:{part}"

    async def announce(self) -> None:
        """Announce a coming tensor, and begin the lease."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.set(self.key("lease"), b"", px=_LEASE_MS)
            _append(pipe, self.list_key, encode(self.passing))
            await pipe.execute()

    async def ask(self) -> None:
        """Ask the receiver to answer with its progress."""
        await _push(self.redis, self.list_key, encode(self.passing))

    async def renew(self, chunks: Iterable[int]) -> bool:
        """Extend the lease, and all keys of these chunks. Return False for an expired lease."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.set(self.key("lease"), b"", px=_LEASE_MS, xx=True)
            for key in (self.list_key, self.key("taken"), *map(self.key, chunks)):
                pipe.pexpire(key, _LEASE_MS)
            return bool((await pipe.execute())[0])

    async def is_leased(self) -> bool:
        return bool(await self.redis.exists(self.key("lease")))

    async def remove(self, chunks: Iterable[int]) -> None:
        """Remove all content of the broker for these chunks."""
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.lrem(self.list_key, 0, cast(Any, encode(self.passing)))
            pipe.delete(self.key("lease"), self.key("taken"), *map(self.key, chunks))
            await pipe.execute()

    async def push(self, part: int | str, value: bytes | memoryview) -> None:
        await _push(self.redis, self.key(part), value)

    async def pop(self, part: int | str) -> bytes | None:
        return await pop(self.redis, self.key(part))


async def pop(redis: Redis, key: str) -> bytes | None:
    """Return the first value of a list; None after a second without any."""
    popped: list[bytes] | None = await cast(Any, redis.blpop([key], timeout=_BLOCK_S))
    return None if popped is None else popped[1]


async def _push(redis: Redis, key: str, value: bytes | memoryview) -> None:
    """Append to a list, which expires LEASE_S from now."""
    async with redis.pipeline(transaction=True) as pipe:
        _append(pipe, key, value)
        await pipe.execute()


def _append(pipe: Any, key: str, value: bytes | memoryview) -> None:
    pipe.rpush(key, value)
    pipe.pexpire(key, _LEASE_MS)
