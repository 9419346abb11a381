"""What tensors leave in the broker when one side, or both, has died amid them, and who removes it.

    the receiver has died   the sender: it gives up, and what it has begun is its to remove (Leftovers)
    the sender has died     the receiver: of what it was taking, again and again (Leftovers), of the rest once (Orphans)
    both have               other receivers that take tensors so (Orphans), by the set of tensors that are under way
    all have                nobody: every key expires, GRACE_S after as long as its sender would have waited

Who has died is what the registry says: see broker.presence.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.presence import Life, is_over
from broker.transports.redis_wire import (
    CHUNK_BYTES,
    GRACE_S,
    Passing,
    cluster_of,
    decode_passing,
    index_key,
    keys_of,
    owner_of,
)
from common.messages import encode
from common.telemetry import get_logger

_REMOVAL_S: Final = 0.5
_TOGETHER_S: Final = 0.05
"""Entries of tensors that have come to their end within so long are removed with one command."""
_REMOVED: Final = 1000
"""The last tensors of which one end removes what is left; those that have come to their end give way to others."""
_MOST_BYTES: Final = 2**14 * CHUNK_BYTES
"""Of a tensor whose ends are both dead no more chunks are looked for than this has."""

log = get_logger()


def sender_of(passing: Passing) -> Life:
    return Life(passing.header.sender, passing.sender_epoch)


class _Keys(NamedTuple):
    """Of a tensor: its receiver's list, where its announcement may be, and keys of its own."""

    list_key: str = ""
    keys: Sequence[str] = ()


@dataclass
class _Left:
    """Of a tensor: its keys, and when (monotonic) they are removed next, and no more."""

    passing: Passing
    keys: _Keys
    is_whole: bool
    interval_s: float
    due_s: float
    until_s: float


class Leftovers:
    """Removes what is left of tensors that have ended, again and again for as long as their keys could last: a command
    whose reply was lost is repeated, and a process that was stopped goes on where it was."""

    def __init__(self, redis: Redis, list_key: str) -> None:
        """Of the tensors of one receiver."""
        self._redis = redis
        self._list = list_key
        self._index = index_key(cluster_of(list_key))
        self._tensors: dict[str, _Left] = {}
        self._added = asyncio.Event()
        self._removing: asyncio.Task[None] | None = None

    def remove(self, passing: Passing, num_bytes: int, *, is_whole: bool = False) -> None:
        """A tensor of which no more than `num_bytes` have come into the broker. In the background: who has given up has
        no time left. Or as soon as the broker can be reached: that it could not may be why.

        Of one that has come to its end hardly more than its entry is ever left: it is looked for ever more seldom.
        """
        now_s = time.monotonic()
        due_s, until_s = now_s + (_TOGETHER_S if is_whole else 0.0), now_s + passing.timeout_s + GRACE_S
        keys = _Keys(self._list, keys_of(self._list, passing, num_bytes))
        self._tensors[passing.id] = _Left(passing, keys, is_whole, _REMOVAL_S, due_s, until_s)
        if len(self._tensors) > _REMOVED:
            whole = (id for id, left in self._tensors.items() if left.is_whole)
            del self._tensors[next(whole, next(iter(self._tensors)))]
        self._added.set()
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove())

    async def _remove(self) -> None:
        while self._tensors:
            self._added.clear()
            due = [left for left in self._tensors.values() if left.due_s <= time.monotonic()]
            try:
                await _remove(self._redis, self._index, {encode(left.passing): left.keys for left in due})
            except (RedisError, AttributeError) as error:  # the latter where the client is closed amid a command
                log.warning("what is left of tensors in the broker cannot be removed yet", error=str(error))
                for left in due:
                    left.due_s = time.monotonic() + _REMOVAL_S
            else:
                for left in due:
                    left.due_s = time.monotonic() + left.interval_s
                    left.interval_s *= 2 if left.is_whole else 1
            self._tensors = {id: left for id, left in self._tensors.items() if time.monotonic() < left.until_s}
            next_s = min((left.due_s for left in self._tensors.values()), default=0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_s - time.monotonic())):
                    await self._added.wait()


class Orphans:
    """Removes what nobody else does, by the set of the tensors that are under way: what dead senders have left for this
    receiver, or for one that is dead as well, and entries of which all keys have expired."""

    def __init__(self, redis: Redis, list_key: str) -> None:
        """`list_key` is this receiver's own."""
        self._redis = redis
        self._list = list_key
        self._index = index_key(cluster_of(list_key))
        self._known_s: dict[bytes, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def remove(self, epochs: Mapping[str, int]) -> None:
        """Look now, in the background; `epochs` are those of all instances that are there. Called now and then."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(epochs))

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self, epochs: Mapping[str, int]) -> None:
        try:
            members = cast(set[bytes], await cast(Any, self._redis.smembers(self._index)))
            await _remove(self._redis, self._index, self._orphans(members, epochs))
        except (RedisError, AttributeError) as error:  # the latter where the client is closed amid a command
            log.warning("cannot look for what is left of tensors in the broker", error=str(error))

    def _orphans(self, members: set[bytes], epochs: Mapping[str, int]) -> dict[bytes, _Keys]:
        """What is to be removed, all by the same moment: `epochs` are no newer than that."""
        now_s = time.monotonic()
        self._known_s = {member: self._known_s.get(member, now_s) for member in members}
        found = {}
        for member, known_s in self._known_s.items():
            try:
                if (keys := self._keys_of_orphan(decode_passing(member), epochs, now_s - known_s)) is not None:
                    found[member] = keys
            except ValueError as error:
                log.warning("dropped an entry of the tensors under way", error=str(error))
                found[member] = _Keys()
        return found

    def _keys_of_orphan(self, passing: Passing, epochs: Mapping[str, int], known_for_s: float) -> _Keys | None:
        """What it may have in the broker; None if it has to stay. Raises ValueError where this is nothing of ours."""
        receiver = owner_of(passing.receiver)
        if index_key(cluster_of(passing.receiver)) != self._index:
            raise ValueError(f"{passing.receiver!r} is no list of this cluster")
        has_expired = known_for_s > passing.timeout_s + GRACE_S
        is_ours = passing.receiver == self._list or is_over(receiver, epochs, known_for_s)
        if not has_expired and not (is_ours and is_over(sender_of(passing), epochs, known_for_s)):
            return None
        keys = keys_of(passing.receiver, passing, min(passing.size_bytes, _MOST_BYTES))
        return _Keys(passing.receiver, keys)


async def _remove(redis: Redis, index: str, tensors: Mapping[bytes, _Keys]) -> None:
    """By their announcements: these, their keys, and themselves."""
    if not tensors:
        return
    async with redis.pipeline(transaction=False) as pipe:
        for member, (list_key, keys) in tensors.items():
            if keys:
                pipe.lrem(list_key, 0, cast(Any, member))
                pipe.delete(*keys)
            pipe.srem(index, cast(Any, member))
        await pipe.execute()
