"""What tensors are in the broker: its keys, what is said under them, and the commands that all of it takes.

    {cluster}:tensors                       the set of every Passing that is under way in the cluster
    {cluster}:tensors:{id}:{epoch}:{token}  a receiver's list of Passing: a tensor is about to come
    {list}:{id}:{n}                         its bytes, chunk after chunk, at most WINDOW of them at a time
    {list}:{id}:taken                       what the receiver says of them

The set is for those that outlive both ends of a tensor: see broker.transports.redis_leftovers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Final, cast

import msgspec
from redis.asyncio import Redis

from broker.presence import Life
from broker.transports.wire import make_decode
from common.messages import Count, Id, TensorHeader, encode

SCHEME: Final = "redis+list"
CHUNK_BYTES: Final = 4 * 2**20
"""Far below the broker's limit of one value (64 MiB), and others wait a few milliseconds at most behind one."""
WINDOW: Final = 4
"""Chunks that may wait in the broker."""
GRACE_S: Final = 5.0
"""How much longer keys last than their sender waits."""
MAX_TIMEOUT_S: Final = 3600.0
TAKEN, DONE, REFUSED = b"taken", b"done", b"refused"
"""What a receiver says: of a chunk, of the last one, of a tensor that it does not take."""
_INDEX_S: Final = 60.0
"""The set lasts for as long after the last tensor, or as its keys do if that is longer."""
_BLOCK_S: Final = 1.0


class Passing(msgspec.Struct, frozen=True):
    """The beginning of a tensor of `size_bytes`, whose sender gives up after `timeout_s`. `sender_epoch` is that of its
    record in the registry, `receiver` the list it goes to."""

    id: Id
    size_bytes: Count
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]
    header: TensorHeader
    sender_epoch: int
    receiver: Annotated[str, msgspec.Meta(max_length=512)]


decode_passing: Final[Callable[[bytes], Passing]] = make_decode(Passing)


def index_key(cluster: str) -> str:
    return f"{cluster}:tensors"


def list_of(cluster: str, receiver: Life) -> str:
    """A new list for what comes to a receiver."""
    return f"{index_key(cluster)}:{receiver.instance_id}:{receiver.epoch}:{secrets.token_hex(4)}"


def cluster_of(list_key: str) -> str:
    return list_key.partition(":tensors:")[0]


def owner_of(list_key: str) -> Life:
    """Whose list this is. Raises ValueError where the name does not tell."""
    instance_id, epoch, _ = list_key.partition(":tensors:")[2].rsplit(":", 2)
    return Life(instance_id, int(epoch))


def chunk_key(list_key: str, passing: Passing, number: int) -> str:
    return f"{list_key}:{passing.id}:{number}"


def answers_key(list_key: str, passing: Passing) -> str:
    return f"{list_key}:{passing.id}:taken"


def keys_of(list_key: str, passing: Passing, num_bytes: int) -> list[str]:
    """All that a tensor may have in the broker beside its announcement, if no more than `num_bytes` of it have come."""
    chunks = [chunk_key(list_key, passing, number) for number in range(-(-num_bytes // CHUNK_BYTES))]
    return [*chunks, answers_key(list_key, passing)]


async def announce(redis: Redis, passing: Passing, longest_s: float) -> None:
    """Say that a tensor is about to come. The set hears of it first. `longest_s` is what a sender may have waited, of
    all tensors that are in the set or the list by now."""
    list_key, member, lasts_s = passing.receiver, cast(Any, encode(passing)), longest_s + GRACE_S
    index = index_key(cluster_of(list_key))
    async with redis.pipeline(transaction=False) as pipe:
        pipe.sadd(index, member)
        pipe.pexpire(index, int(max(lasts_s, _INDEX_S) * 1000))
        pipe.rpush(list_key, member)
        pipe.pexpire(list_key, int(lasts_s * 1000))
        await pipe.execute()


async def push(redis: Redis, key: str, value: bytes | memoryview, passing: Passing) -> None:
    """Append to a list of this tensor, which lasts for GRACE_S longer than its sender waits at most."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.rpush(key, cast(Any, value))
        pipe.pexpire(key, int((passing.timeout_s + GRACE_S) * 1000))
        await pipe.execute()


async def pop(redis: Redis, key: str) -> bytes | None:
    """The first value of a list, None if there is none for a second."""
    popped: list[bytes] | None = await cast(Any, redis.blpop([key], timeout=_BLOCK_S))
    return None if popped is None else popped[1]
