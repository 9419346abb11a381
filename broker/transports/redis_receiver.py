"""The receiving side of tensors through the broker. See broker.transports.redis_transport for the whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.presence import NOBODY, Life, is_over
from broker.transports.base import ReceivedTensor
from broker.transports.redis_leftovers import Leftovers, Orphans, sender_of
from broker.transports.redis_wire import (
    CHUNK_BYTES,
    DONE,
    REFUSED,
    SCHEME,
    TAKEN,
    WINDOW,
    Passing,
    answers_key,
    chunk_key,
    decode_passing,
    list_of,
    pop,
    push,
)
from common.messages import InstanceRecord
from common.telemetry import get_logger

_RETRY_S: Final = 1.0
_READY_TENSORS: Final = 2
_REMEMBERED: Final = 5000
"""Tensors that a receiver knows to have begun: more than there are until it has noticed that a sender is gone."""

log = get_logger()


class _Begun(NamedTuple):
    passing: Passing
    began_s: float


class RedisReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(
        self, redis: Redis, cluster: str, on_arrival: Callable[[], None], *, max_bytes: int, own: Life = NOBODY
    ) -> None:
        """`cluster` begins all keys; `own` is the life of this instance in the registry."""
        self._redis = redis
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self._list = list_of(cluster, own)
        self.address = f"{SCHEME}://{self._list}"
        self.num_invalid = self.num_unfinished = 0
        self._arrived: asyncio.Queue[ReceivedTensor] = asyncio.Queue(_READY_TENSORS)
        self._begun: dict[str, _Begun | None] = {}  # the last tensors, the oldest first; None: forgotten
        self._collecting: dict[str, asyncio.Task[None]] = {}  # tensors of which something has still to come
        self._leftovers = Leftovers(redis, self._list)
        self._orphans = Orphans(redis, self._list)
        self._tasks = {asyncio.create_task(self._listen())}

    def take(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def keep_only(self, senders: Iterable[InstanceRecord]) -> None:
        """Forget the tensors of all other senders, which are gone: what has not come will not, and nobody reads the
        answers. Called now and then."""
        epochs = {sender.instance_id: sender.epoch for sender in senders}
        now_s = time.monotonic()
        begun = [one for one in self._begun.values() if one is not None]
        orphans = [passing for passing, began_s in begun if is_over(sender_of(passing), epochs, now_s - began_s)]
        for passing in orphans:
            self._forget(passing)
        for passing in {sender_of(passing): passing for passing in orphans}.values():
            self._remove_left(passing)  # the last one: a sender has one at a time on its way to a receiver
        self._orphans.remove(epochs)

    def close(self) -> None:
        self._orphans.close()
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
                data = await pop(self._redis, self._list)
                if data is not None:
                    self._begin(decode_passing(data))
            except ValueError as error:
                self._count_invalid(str(error))
            except RedisError as error:  # away, or somebody has put something else under our key
                log.warning("cannot take tensors from the broker", error=str(error))
                await asyncio.sleep(_RETRY_S)

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
                    await self._answer(passing, REFUSED)
                    return
                finally:
                    self._collecting.pop(passing.id, None)
                await self._arrived.put(ReceivedTensor(passing.header, memoryview(data)))
                self._on_arrival()
                await self._answer(passing, DONE)
        except (TimeoutError, RedisError) as error:
            self._count_unfinished(passing, str(error))

    async def _collect(self, passing: Passing) -> bytearray:
        """Raises ValueError for a tensor that is too large, or whose chunks are."""
        if passing.size_bytes > self._max_bytes:
            raise ValueError(f"a tensor of {passing.size_bytes} bytes, at most {self._max_bytes} are taken")
        data, filled, number = bytearray(passing.size_bytes), 0, 0
        while filled < len(data):
            chunk = await pop(self._redis, chunk_key(self._list, passing, number))
            if chunk is None:
                continue
            if filled + len(chunk) > len(data):
                raise ValueError(f"{filled + len(chunk)} bytes have come of a tensor of {len(data)}")
            data[filled : filled + len(chunk)] = chunk
            filled, number = filled + len(chunk), number + 1
            await self._answer(passing, TAKEN)
        return data

    async def _answer(self, passing: Passing, answer: bytes) -> None:
        await push(self._redis, answers_key(self._list, passing), answer, passing)

    def _count_invalid(self, why: str) -> None:
        self.num_invalid += 1
        log.warning("dropped a tensor of the broker", error=why)

    def _count_unfinished(self, passing: Passing, why: str) -> None:
        self.num_unfinished += 1
        log.warning("a tensor did not come to its end", sender=passing.header.sender, error=why)
