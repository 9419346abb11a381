"""The receiving side of tensors through the broker. See broker.transports.redis.sender for the whole."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.transports.base import OnArrival
from broker.transports.received import ReceivedTensor
from broker.transports.redis.wire import DONE, LOST, REFUSED, SCHEME, Parcel, Passing, decode_passing, pop
from common.telemetry import get_logger

_RETRY_S: Final = 1.0
_READY_TENSORS: Final = 2
_REMEMBERED: Final = 5000
"""Tensors known to have begun: more than senders may still ask for."""

log = get_logger()


class RedisReceiver:
    """See broker.transports.base.Receiver."""

    def __init__(self, redis: Redis, cluster: str, on_arrival: OnArrival, *, max_bytes: int) -> None:
        self._redis = redis
        self._on_arrival = on_arrival
        self._max_bytes = max_bytes
        self._list = f"{cluster}:tensors:{secrets.token_hex(8)}"
        self.address = f"{SCHEME}://{self._list}"
        self.num_invalid = self.num_unfinished = 0
        self._arrived: asyncio.Queue[ReceivedTensor] = asyncio.Queue(_READY_TENSORS)
        self._said: dict[str, bytes] = {}  # what was last said of the last tensors, the oldest first
        self._tasks = {asyncio.create_task(self._listen())}

    def pop(self) -> ReceivedTensor | None:
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _listen(self) -> None:
        while True:
            try:
                data = await pop(self._redis, self._list)
                if data is not None:
                    self._handle(decode_passing(data))
            except ValueError as error:
                self._count_invalid(str(error))
            except RedisError as error:  # away, or somebody has put something else under our key
                log.warning("cannot take tensors from the broker", error=str(error))
                await asyncio.sleep(_RETRY_S)

    def _handle(self, passing: Passing) -> None:
        """Begin a tensor, in a task of its own; or answer a sender's question for progress."""
        is_new = passing.id not in self._said
        if is_new:
            self._said[passing.id] = b"0"
            if len(self._said) > _REMEMBERED:
                del self._said[next(iter(self._said))]
        doing = self._receive(passing) if is_new else self._answer(passing, self._said[passing.id])
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, passing: Passing) -> None:
        """Receive one tensor, from the announcement to the last byte."""
        try:
            async with asyncio.timeout(passing.timeout_s):
                try:
                    data = await self._collect(passing)
                except ValueError as error:
                    self._count_invalid(str(error))
                    await self._answer(passing, REFUSED)
                    return
                await self._arrived.put(ReceivedTensor(passing.header, memoryview(data)))
                self._on_arrival(self)
                await self._answer(passing, DONE)
        except (TimeoutError, RedisError) as error:
            self._said[passing.id] = LOST
            self.num_unfinished += 1
            log.warning("a tensor did not come to its end", sender=passing.header.sender, error=str(error))

    async def _collect(self, passing: Passing) -> bytearray:
        """Collect the chunks. Raises ValueError above the limits, TimeoutError for a dead sender."""
        if passing.size_bytes > self._max_bytes:
            raise ValueError(f"a tensor of {passing.size_bytes} bytes, at most {self._max_bytes} are taken")
        parcel = Parcel(self._redis, self._list, passing)
        data, filled, number, was_leased = bytearray(passing.size_bytes), 0, 0, True
        while filled < len(data):
            chunk = await parcel.pop(number)
            if chunk is None:
                leased = await parcel.is_leased()
                if not leased and not was_leased:  # once may be the broker's fault: the sender begins a new lease then
                    raise TimeoutError("its sender is gone, or was away for too long")
                was_leased = leased
                continue
            was_leased = True
            if filled + len(chunk) > len(data):
                raise ValueError(f"{filled + len(chunk)} bytes have come of a tensor of {len(data)}")
            data[filled : filled + len(chunk)] = chunk
            filled, number = filled + len(chunk), number + 1
            await self._answer(passing, b"%d" % number)
        return data

    async def _answer(self, passing: Passing, answer: bytes) -> None:
        """Answer the sender; after a lost answer, the sender asks again."""
        self._said[passing.id] = answer
        try:
            await Parcel(self._redis, self._list, passing).push("taken", answer)
        except RedisError as error:
            log.warning("cannot answer the sender of a tensor", sender=passing.header.sender, error=str(error))

    def _count_invalid(self, why: str) -> None:
        self.num_invalid += 1
        log.warning("dropped a tensor of the broker", error=why)
