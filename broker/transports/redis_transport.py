"""Tensors through the broker: where processes reach nothing but Redis. Everything else is faster.

    {list}             the receiver's list of Passing: a tensor is about to come
    {list}:{id}:{n}    its bytes, chunk after chunk, at most WINDOW of them at a time
    {list}:{id}:taken  what the receiver says of them

The broker so holds no more than a few chunks per pair, and what has been taken is gone at once. A command whose reply
was lost is repeated, and may have been carried out: so each chunk has a key of its own, a tensor that begins twice is
taken once, and the sender removes what is there twice. Where one side dies the other one removes what is left; where
both do, every key expires: GRACE_S after as long as its sender waits at most, from when something was put there.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NamedTuple, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.presence import ABSENCE_S
from broker.transports.base import ReceivedTensor, took_none
from broker.transports.passes import with_checksum
from broker.transports.wire import make_decode
from common.errors import TriptychError
from common.messages import Count, Id, InstanceRecord, TensorHeader, encode
from common.telemetry import get_logger

SCHEME: Final = "redis+list"
CHUNK_BYTES: Final = 4 * 2**20
"""Far below the broker's limit of one value (64 MiB), and others wait a few milliseconds at most behind one."""
WINDOW: Final = 4
"""Chunks that may wait in the broker."""
GRACE_S: Final = 5.0
"""How much longer keys last than their sender waits."""
MAX_TIMEOUT_S: Final = 3600.0
_BLOCK_S: Final = 1.0
_REMOVAL_S: Final = 0.5
_READY_TENSORS: Final = 2
_REMEMBERED: Final = 5000
"""Tensors that a receiver knows to have begun: more than there are until it has noticed that a sender is gone."""
_REMOVED: Final = 1000
"""The last tensors of which one end removes what is left; those that have come to their end give way to others."""
_TAKEN, _DONE, _REFUSED = b"taken", b"done", b"refused"

log = get_logger()


class Passing(msgspec.Struct, frozen=True):
    """The beginning of a tensor of `size_bytes`, whose sender gives up after `timeout_s`. `sender_epoch` is that of its
    record in the registry."""

    id: Id
    size_bytes: Count
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]
    header: TensorHeader
    sender_epoch: int


decode_passing: Final[Callable[[bytes], Passing]] = make_decode(Passing)


class _Begun(NamedTuple):
    passing: Passing
    began_s: float

    def is_orphan(self, epochs: dict[str, int]) -> bool:
        """Whether its sender is none of these. One that has just come, or come back, may not be among them yet."""
        epoch = epochs.get(self.passing.header.sender)
        if epoch is None:
            return time.monotonic() - self.began_s > ABSENCE_S
        return epoch > self.passing.sender_epoch


class RedisReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(self, redis: Redis, cluster: str, on_arrival: Callable[[], None], *, max_bytes: int) -> None:
        """`cluster` begins all keys."""
        self._redis = redis
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self._list = f"{cluster}:tensors:{secrets.token_hex(16)}"
        self.address = f"{SCHEME}://{self._list}"
        self.num_invalid = self.num_unfinished = 0
        self._arrived: asyncio.Queue[ReceivedTensor] = asyncio.Queue(_READY_TENSORS)
        self._begun: dict[str, _Begun | None] = {}  # the last tensors, the oldest first; None: forgotten
        self._collecting: dict[str, asyncio.Task[None]] = {}  # tensors of which something has still to come
        self._leftovers = _Leftovers(redis, self._list)
        self._tasks = {asyncio.create_task(self._listen())}

    def take(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def keep_only(self, senders: Iterable[InstanceRecord]) -> None:
        """Forget the tensors of all other senders, which are gone: what has not come will not, and nobody reads the
        answers. Called now and then."""
        epochs = {sender.instance_id: sender.epoch for sender in senders}
        orphans = [begun for begun in self._begun.values() if begun is not None and begun.is_orphan(epochs)]
        last_of = {(one.passing.header.sender, one.passing.sender_epoch): one.passing for one in orphans}
        for begun in orphans:
            self._forget(begun.passing)
        for passing in last_of.values():  # a sender has one at a time on its way to a receiver
            self._remove_left(passing)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _forget(self, passing: Passing) -> None:
        self._begun[passing.id] = None
        collecting = self._collecting.pop(passing.id, None)
        if collecting is not None:
            collecting.cancel()
            self._count_unfinished(passing, "its sender is gone")
            self._remove_left(passing)

    def _remove_left(self, passing: Passing) -> None:
        self._leftovers.remove(passing, min(passing.size_bytes, max(self._max_bytes, WINDOW * CHUNK_BYTES)))

    async def _listen(self) -> None:
        while True:
            try:
                data = await _pop(self._redis, self._list)
                if data is not None:
                    self._begin(decode_passing(data))
            except ValueError as error:
                self._count_invalid(str(error))
            except RedisError as error:  # away, or somebody has put something else under our key
                log.warning("cannot take tensors from the broker", error=str(error))
                await asyncio.sleep(_BLOCK_S)

    def _begin(self, passing: Passing) -> None:
        """Once for each tensor."""
        if passing.id in self._begun:
            return
        task = self._collecting[passing.id] = asyncio.create_task(self._take(passing))
        self._begun[passing.id] = _Begun(passing, time.monotonic())
        if len(self._begun) > _REMEMBERED:
            del self._begun[next(iter(self._begun))]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, passing: Passing) -> None:
        """One tensor, from its announcement to its last byte; in a task of its own, for a sender may be slow."""
        try:
            async with asyncio.timeout(passing.timeout_s):
                try:
                    data = await self._collect(passing)
                except ValueError as error:
                    self._count_invalid(str(error))
                    await self._answer(passing, _REFUSED)
                    return
                finally:
                    self._collecting.pop(passing.id, None)
                await self._arrived.put(ReceivedTensor(passing.header, memoryview(data)))
                self._on_arrival()
                await self._answer(passing, _DONE)
        except (TimeoutError, RedisError) as error:
            self._count_unfinished(passing, str(error))

    async def _collect(self, passing: Passing) -> bytearray:
        """Raises ValueError for a tensor that is too large, or whose chunks are."""
        if passing.size_bytes > self._max_bytes:
            raise ValueError(f"a tensor of {passing.size_bytes} bytes, at most {self._max_bytes} are taken")
        data, filled, number = bytearray(passing.size_bytes), 0, 0
        while filled < len(data):
            chunk = await _pop(self._redis, _chunk_key(self._list, passing, number))
            if chunk is None:
                continue
            if filled + len(chunk) > len(data):
                raise ValueError(f"{filled + len(chunk)} bytes have come of a tensor of {len(data)}")
            data[filled : filled + len(chunk)] = chunk
            filled, number = filled + len(chunk), number + 1
            await self._answer(passing, _TAKEN)
        return data

    async def _answer(self, passing: Passing, answer: bytes) -> None:
        await _push(self._redis, _answers_key(self._list, passing), answer, passing.timeout_s + GRACE_S)

    def _count_invalid(self, why: str) -> None:
        self.num_invalid += 1
        log.warning("dropped a tensor of the broker", error=why)

    def _count_unfinished(self, passing: Passing, why: str) -> None:
        self.num_unfinished += 1
        log.warning("a tensor did not come to its end", sender=passing.header.sender, error=why)


class RedisConnection:
    """See broker.transports.base.Connection. Returns when the receiver has all of a tensor; one goes at a time."""

    scheme: ClassVar[str] = SCHEME

    def __init__(self, redis: Redis, address: str, epoch: int = 0) -> None:
        """`epoch` is that of the sender's record in the registry."""
        self._redis = redis
        self._address = address
        self._epoch = epoch
        self._list = address.partition("://")[2]
        self._turn = asyncio.Lock()
        self._leftovers = _Leftovers(redis, self._list)
        self._closed = False

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        header = await with_checksum(header, data)
        passing = Passing(secrets.token_hex(8), data.nbytes, min(timeout_s, MAX_TIMEOUT_S), header, self._epoch)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                self._require_open()
                try:
                    await self._pass(passing, data)
                except BaseException:
                    self._leftovers.remove(passing, data.nbytes)
                    raise
                self._leftovers.remove(passing, data.nbytes, is_whole=True)
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except RedisError as error:
            raise TriptychError("unavailable", f"the broker does not take a tensor: {error}") from error

    def close(self) -> None:
        """The receiver is gone, or nobody sends any more: what is being sent fails within a second."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise TriptychError("unavailable", f"the connection to {self._address} is closed")

    async def _pass(self, passing: Passing, data: memoryview) -> None:
        expires_s = passing.timeout_s + GRACE_S
        await _push(self._redis, self._list, encode(passing), expires_s)
        waiting = 0
        for start in range(0, len(data), CHUNK_BYTES):
            if waiting == WINDOW:
                await self._answer(passing)
                waiting -= 1
            chunk = data[start : start + CHUNK_BYTES]
            await _push(self._redis, _chunk_key(self._list, passing, start // CHUNK_BYTES), chunk, expires_s)
            waiting += 1
        while await self._answer(passing) != _DONE:
            pass

    async def _answer(self, passing: Passing) -> bytes:
        """What the receiver says next. Raises TriptychError where it refuses."""
        while (answer := await _pop(self._redis, _answers_key(self._list, passing))) is None:
            self._require_open()
        if answer == _REFUSED:
            raise TriptychError("invalid_request", f"{self._address} refused a tensor of {passing.size_bytes} bytes")
        return answer


@dataclass
class _Left:
    """Of a tensor: its keys, and when (monotonic) they are removed next, and no more."""

    passing: Passing
    keys: list[str]
    is_whole: bool
    interval_s: float
    due_s: float
    until_s: float


class _Leftovers:
    """Removes what is left of tensors that have ended, again and again for as long as their keys could last: a command
    whose reply was lost is repeated, and a process that was stopped goes on where it was."""

    def __init__(self, redis: Redis, receiver: str) -> None:
        self._redis = redis
        self._list = receiver
        self._tensors: dict[str, _Left] = {}
        self._removing: asyncio.Task[None] | None = None

    def remove(self, passing: Passing, num_bytes: int, *, is_whole: bool = False) -> None:
        """A tensor of which no more than `num_bytes` have come into the broker. In the background: who has given up has
        no time left. Or as soon as the broker can be reached: that it could not may be why.

        Of one that has come to its end hardly anything is ever left: it is looked for ever more seldom.
        """
        now_s = time.monotonic()
        keys = [_chunk_key(self._list, passing, number) for number in range(-(-num_bytes // CHUNK_BYTES))]
        keys.append(_answers_key(self._list, passing))
        due_s, until_s = now_s + (_REMOVAL_S if is_whole else 0.0), now_s + passing.timeout_s + GRACE_S
        self._tensors[passing.id] = _Left(passing, keys, is_whole, _REMOVAL_S, due_s, until_s)
        if len(self._tensors) > _REMOVED:
            whole = (id for id, left in self._tensors.items() if left.is_whole)
            del self._tensors[next(whole, next(iter(self._tensors)))]
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove())

    async def _remove(self) -> None:
        while self._tensors:
            due = [left for left in self._tensors.values() if left.due_s <= time.monotonic()]
            try:
                if due:
                    await self._remove_once(due)
            except (RedisError, AttributeError) as error:  # the latter where the client is closed amid a command
                log.warning("what is left of tensors in the broker cannot be removed yet", error=str(error))
            else:
                for left in due:
                    left.interval_s *= 2 if left.is_whole else 1
                    left.due_s += left.interval_s
            self._tensors = {id: left for id, left in self._tensors.items() if time.monotonic() < left.until_s}
            await asyncio.sleep(_REMOVAL_S)

    async def _remove_once(self, due: Iterable[_Left]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for left in due:
                pipe.lrem(self._list, 0, cast(Any, encode(left.passing)))
                pipe.delete(*left.keys)
            await pipe.execute()


def _chunk_key(receiver: str, passing: Passing, number: int) -> str:
    return f"{receiver}:{passing.id}:{number}"


def _answers_key(receiver: str, passing: Passing) -> str:
    return f"{receiver}:{passing.id}:taken"


async def _push(redis: Redis, key: str, value: bytes | memoryview, expires_s: float) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        pipe.rpush(key, cast(Any, value))
        pipe.pexpire(key, int(expires_s * 1000))
        await pipe.execute()


async def _pop(redis: Redis, key: str) -> bytes | None:
    """The first value of a list, None if there is none for a second."""
    popped: list[bytes] | None = await cast(Any, redis.blpop([key], timeout=_BLOCK_S))
    return None if popped is None else popped[1]
