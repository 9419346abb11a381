"""Tensors through the broker: where processes reach nothing but Redis. Everything else is faster.

    sender                               broker                              receiver
    announce    -- Passing ------------> set of the cluster, list ---------> begins to take it
    push        -- chunk, WINDOW at most -> a key of its own --------------> takes it
                <- taken, at last done --- a list of answers <-------------- says so

The broker so holds no more than a few chunks per pair, and what has been taken is gone at once. A command whose reply
was lost is repeated, and may have been carried out: so each chunk has a key of its own, a tensor that begins twice is
taken once, and the sender removes what is there twice. What the dead leave is the business of
broker.transports.redis_leftovers; the keys stand in broker.transports.redis_wire.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import ClassVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.transports.base import took_none
from broker.transports.passes import with_checksum
from broker.transports.redis_leftovers import Leftovers
from broker.transports.redis_wire import (
    CHUNK_BYTES,
    DONE,
    MAX_TIMEOUT_S,
    REFUSED,
    SCHEME,
    WINDOW,
    Passing,
    announce,
    answers_key,
    chunk_key,
    pop,
    push,
)
from common.errors import TriptychError
from common.messages import TensorHeader


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
        self._leftovers = Leftovers(redis, self._list)
        self._longest_s = 0.0
        self._closed = False

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        header = await with_checksum(header, data)
        lasts_s = min(timeout_s, MAX_TIMEOUT_S)
        passing = Passing(secrets.token_hex(8), data.nbytes, lasts_s, header, self._epoch, self._list)
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
        self._longest_s = max(self._longest_s, passing.timeout_s)  # or a hurried one would shorten the others' life
        await announce(self._redis, passing, self._longest_s)
        waiting = 0
        for start in range(0, len(data), CHUNK_BYTES):
            if waiting == WINDOW:
                await self._answer(passing)
                waiting -= 1
            chunk = data[start : start + CHUNK_BYTES]
            await push(self._redis, chunk_key(self._list, passing, start // CHUNK_BYTES), chunk, passing)
            waiting += 1
        while await self._answer(passing) != DONE:
            pass

    async def _answer(self, passing: Passing) -> bytes:
        """What the receiver says next. Raises TriptychError where it refuses."""
        while (answer := await pop(self._redis, answers_key(self._list, passing))) is None:
            self._require_open()
        if answer == REFUSED:
            raise TriptychError("invalid_request", f"{self._address} refused a tensor of {passing.size_bytes} bytes")
        return answer
