"""Tensors through the broker: where processes reach nothing but Redis. Everything else is faster.

    {list}             the receiver's list of Passing: a tensor is about to come
    {list}:{id}:{n}    its bytes, chunk after chunk, at most WINDOW of them at a time
    {list}:{id}:taken  what the receiver says of them

The broker so holds no more than a few chunks per pair. Every key expires soon after the sender's deadline: nothing is
left of a process that dies, and what has been taken is gone at once. A command whose reply was lost is repeated, and
may have been carried out: so each chunk has a key of its own, a tensor that begins twice is taken once, and the sender
removes what is there twice.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.redis_client import pass_on_cancellation
from broker.transports.base import ReceivedTensor, took_none
from broker.transports.passes import with_checksum
from broker.transports.wire import make_decode
from common.errors import TriptychError
from common.messages import Count, Id, TensorHeader, encode
from common.telemetry import get_logger

SCHEME: Final = "redis+list"
CHUNK_BYTES: Final = 4 * 2**20
"""Far below the broker's limit of one value (64 MiB), and others wait a few milliseconds at most behind one."""
WINDOW: Final = 4
"""Chunks that may wait in the broker."""
GRACE_S: Final = 5.0
"""How long keys outlive the deadline of their sender."""
MAX_TIMEOUT_S: Final = 3600.0
REMOVALS_S: Final = (0.0, 0.5, 3.0)
"""When the sender removes what is left of a tensor that did not come to its end: the receiver may be answering, or may
repeat an answer of which it does not know whether it was heard."""
_BLOCK_S: Final = 1.0
_READY_TENSORS: Final = 2
_REMEMBERED: Final = 1000
_TAKEN, _DONE, _REFUSED = b"taken", b"done", b"refused"

log = get_logger()


class Passing(msgspec.Struct, frozen=True):
    """The beginning of a tensor of `size_bytes`, whose sender gives up after `timeout_s`."""

    id: Id
    size_bytes: Count
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]
    header: TensorHeader


decode_passing: Final[Callable[[bytes], Passing]] = make_decode(Passing)


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
        self._begun: dict[str, None] = {}  # the last tensors, the oldest first
        self._tasks = {asyncio.create_task(self._listen())}

    def take(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

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
        self._begun[passing.id] = None
        if len(self._begun) > _REMEMBERED:
            del self._begun[next(iter(self._begun))]
        task = asyncio.create_task(self._take(passing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, passing: Passing) -> None:
        """One tensor, from its announcement to its last byte; in a task of its own, for a sender may be slow."""
        try:
            async with asyncio.timeout(passing.timeout_s):
                if passing.size_bytes > self._max_bytes:
                    raise ValueError(f"a tensor of {passing.size_bytes} bytes, at most {self._max_bytes} are taken")
                data = await self._collect(passing)
                await self._arrived.put(ReceivedTensor(passing.header, memoryview(data)))
                self._on_arrival()
                await self._answer(passing, _DONE)
        except ValueError as error:
            self._count_invalid(str(error))
            await self._answer(passing, _REFUSED)
        except (TimeoutError, RedisError) as error:
            self.num_unfinished += 1
            log.warning("a tensor did not come to its end", sender=passing.header.sender, error=str(error))

    async def _collect(self, passing: Passing) -> bytearray:
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


class RedisConnection:
    """See broker.transports.base.Connection. Returns when the receiver has all of a tensor; one goes at a time."""

    scheme: ClassVar[str] = SCHEME

    def __init__(self, redis: Redis, address: str) -> None:
        self._redis = redis
        self._address = address
        self._list = address.partition("://")[2]
        self._turn = asyncio.Lock()
        self._cleaning: set[asyncio.Task[None]] = set()

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        header = await with_checksum(header, data)
        passing = Passing(secrets.token_hex(8), data.nbytes, min(timeout_s, MAX_TIMEOUT_S), header)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                try:
                    await self._pass(passing, data)
                except BaseException:
                    self._clean_up(passing, REMOVALS_S)
                    raise
                self._clean_up(passing, REMOVALS_S[1:2])
        except TimeoutError as error:
            raise took_none(self._address, timeout_s) from error
        except RedisError as error:
            raise TriptychError("unavailable", f"the broker does not take a tensor: {error}") from error

    def close(self) -> None:
        """Nothing is open: what waits in the broker for a receiver that has gone expires."""

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
            pass
        if answer == _REFUSED:
            raise TriptychError("invalid_request", f"{self._address} refused a tensor of {passing.size_bytes} bytes")
        return answer

    def _clean_up(self, passing: Passing, when_s: Sequence[float]) -> None:
        """Remove what nobody will take any more; in the background, for the sender has no time left."""
        task = asyncio.create_task(self._remove(passing, when_s))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _remove(self, passing: Passing, when_s: Sequence[float]) -> None:
        """At these seconds from now, or as soon afterwards as the broker can be reached: that it could not may be why
        the tensor has been given up. No longer than its keys would last."""
        began_s = time.monotonic()
        for due_s in when_s:
            await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
            while not await self._removed(passing):
                if time.monotonic() - began_s > passing.timeout_s + GRACE_S:
                    return
                await asyncio.sleep(_BLOCK_S / 2)

    async def _removed(self, passing: Passing) -> bool:
        num_chunks = -(-passing.size_bytes // CHUNK_BYTES)
        keys = [_chunk_key(self._list, passing, number) for number in range(num_chunks)]
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.lrem(self._list, 0, cast(Any, encode(passing)))
                pipe.delete(_answers_key(self._list, passing), *keys)
                await pipe.execute()
            return True
        except RedisError as error:
            log.warning("what is left of a tensor in the broker cannot be removed yet", error=str(error))
            return False


def _chunk_key(receiver: str, passing: Passing, number: int) -> str:
    return f"{receiver}:{passing.id}:{number}"


def _answers_key(receiver: str, passing: Passing) -> str:
    return f"{receiver}:{passing.id}:taken"


async def _push(redis: Redis, key: str, value: bytes | memoryview, expires_s: float) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        pipe.rpush(key, cast(Any, value))
        pipe.pexpire(key, int(expires_s * 1000))
        await pipe.execute()
    pass_on_cancellation()


async def _pop(redis: Redis, key: str) -> bytes | None:
    """The first value of a list, None if there is none for a second."""
    popped: list[bytes] | None = await cast(Any, redis.blpop([key], timeout=_BLOCK_S))
    pass_on_cancellation()
    return None if popped is None else popped[1]
