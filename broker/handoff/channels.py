"""The message channels of the handoff: Redis Streams, one per instance and channel, acknowledged.

    {cluster}:{instance_id}:metadata     offers to a receiver
    {cluster}:{instance_id}:allocated    grants to a sender
    {cluster}:{instance_id}:injected     receipts to a sender

The tensor between a grant and a receipt is the fourth message; it goes by a transport (`broker.transports`).
Each stream has one consumer: its instance, which creates the stream and keeps it from expiring. Senders never create
one, so nothing is left behind for an instance that is gone. An entry is deleted once handled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from common.errors import TriptychError
from common.messages import HandoffMessage, decode_handoff, encode
from common.telemetry import get_logger

ChannelName = Literal["metadata", "allocated", "injected"]
GROUP: Final = "worker"
FIELD: Final = b"m"
MAX_ENTRIES: Final = 10_000
"""Older entries are trimmed, and counted: far more than a live receiver ever leaves unread."""
MAX_WAITING: Final = 10_000
"""Messages that may wait in a sender while Redis is away; then the oldest are discarded: offers are repeated."""
STREAM_TTL_S: Final = 60
"""How long the streams of an instance that died without a goodbye stay in Redis."""
_BLOCK_MS: Final = 1000
_BATCH: Final = 64
_RETRY_S: Final = 0.05
_TRY_S: Final = 0.5
"""Shortest try to send, for a message of any age."""

log = get_logger()


def stream_key(cluster: str, instance_id: str, channel: ChannelName) -> str:
    return f"{cluster}:{instance_id}:{channel}"


@dataclass(frozen=True)
class Delivery:
    """A received message. `stale`: addressed to a former process with this instance id."""

    stream: bytes
    entry_id: bytes
    message: HandoffMessage
    stale: bool


@dataclass(frozen=True)
class _Entry:
    stream: str
    data: bytes
    queued_s: float


class ChannelSender:
    """Sends messages to other instances, in order, from one queue by one task: no caller waits.

    A message without a stream, or refused by Redis, is tried again for `timeout_s`, then discarded and counted. A try
    without an answer in time is abandoned: Redis may still deliver its messages, so twice or late.
    """

    def __init__(self, redis: Redis, cluster: str, timeout_s: float = 2.0) -> None:
        self._redis = redis
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[_Entry] = asyncio.Queue()
        self._away = False  # whether the last try failed
        self.num_dropped = 0
        self.num_trimmed = 0
        """Oldest messages of full streams, of any sender: nearly all of them unread."""

    def send(self, instance_id: str, channel: ChannelName, message: HandoffMessage) -> None:
        """Queue one message."""
        if self._queue.qsize() >= MAX_WAITING:
            self._queue.get_nowait()
            self.num_dropped += 1
        stream = stream_key(self._cluster, instance_id, channel)
        self._queue.put_nowait(_Entry(stream, encode(message), time.monotonic()))

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def run(self) -> None:
        """Send queued messages until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            if self._away:
                batch = self._unexpired(batch)  # they are as old as what has just been given up
            pause_s = 0.02
            while batch and not await self._send_batch(batch):
                if batch := self._unexpired(batch):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 0.5)
                    batch = self._unexpired(batch)

    async def _send_batch(self, batch: list[_Entry]) -> bool:
        """Send in one round trip; return False if Redis is away, refuses, or is silent until a message expires."""
        self._away = True
        streams = dict.fromkeys(entry.stream for entry in batch)
        try:
            oldest_s = min(entry.queued_s for entry in batch)
            async with asyncio.timeout(max(_TRY_S, oldest_s + self._timeout_s - time.monotonic())):
                async with self._redis.pipeline(transaction=False) as pipe:
                    for entry in batch:
                        pipe.xadd(entry.stream, {FIELD: entry.data}, nomkstream=True)
                    for stream in streams:  # apart from XADD, which does not return their number
                        pipe.xtrim(stream, maxlen=MAX_ENTRIES)
                    results = await pipe.execute(raise_on_error=False)
        except (TimeoutError, RedisError):  # away, loading, or refusing: whatever it is, it may pass
            return False
        self._away = False
        for entry, result in zip(batch, results[: len(batch)], strict=True):
            if isinstance(result, Exception | None) and not self._expired(entry, str(result or "no such stream")):
                asyncio.get_running_loop().call_later(_RETRY_S, self._queue.put_nowait, entry)
        for stream, trimmed in zip(streams, results[len(batch) :], strict=True):
            if isinstance(trimmed, int) and trimmed:
                self.num_trimmed += trimmed
                log.warning("a receiver does not read: its oldest messages are lost", stream=stream, lost=trimmed)
        return True

    def _unexpired(self, batch: list[_Entry]) -> list[_Entry]:
        return [entry for entry in batch if not self._expired(entry, "no broker")]

    def _expired(self, entry: _Entry, why: str) -> bool:
        if time.monotonic() - entry.queued_s < self._timeout_s:
            return False
        self.num_dropped += 1
        log.warning("dropped a message", stream=entry.stream, why=why)
        return True


class ChannelReader:
    """Receives the messages on some of this instance's channels, by a Redis client without retries.

    After a lost connection the reader first looks for messages on their way, which a repeated call would skip.
    """

    def __init__(self, redis: Redis, cluster: str, instance_id: str, channels: tuple[ChannelName, ...]) -> None:
        self._redis = redis
        self._streams = [stream_key(cluster, instance_id, channel).encode() for channel in channels]
        self._former: dict[bytes, tuple[int, int]] = {}  # last entry meant for a former process, per stream
        self._look_for_unacknowledged = True
        self.num_invalid = 0

    async def open(self) -> None:
        """Create the streams. Messages present by now were addressed to a former process with this id: stale."""
        for stream in self._streams:
            await self._create(stream)
            info: dict[str, Any] = await self._redis.xinfo_stream(stream)
            self._former[stream] = _parse_id(info["last-generated-id"])

    async def run(self, handle: Callable[[Delivery], None]) -> None:
        """Receive, handle and remove messages until cancelled. One may come twice; `handle` must not raise."""
        pause_s = 0.0
        while True:
            try:
                deliveries = await self._next()
                for delivery in deliveries:
                    handle(delivery)
                await self._remove([(delivery.stream, delivery.entry_id) for delivery in deliveries])
                pause_s = 0.0
            except RedisError as error:  # away, loading, or refusing: whatever it is, it may pass
                if not pause_s:
                    log.warning("cannot read from the broker", error=str(error))
                self._look_for_unacknowledged = True
                pause_s = min(max(0.05, 2 * pause_s), 1.0)
                await asyncio.sleep(pause_s)

    async def _next(self) -> list[Delivery]:
        """Return the next messages, in order; an empty list after a second without any."""
        if self._look_for_unacknowledged:
            deliveries = await self._read("0")
            self._look_for_unacknowledged = bool(deliveries)
            if deliveries:
                return deliveries
        return await self._read(">", block_ms=_BLOCK_MS)

    async def keep_alive(self) -> None:
        """Extend the expiry of the streams and recreate vanished streams; called with the heartbeat."""
        for stream in self._streams:
            if not await self._redis.expire(stream, STREAM_TTL_S):
                await self._create(stream)

    async def delete(self) -> None:
        """Remove the streams when this instance ends."""
        await self._redis.delete(*self._streams)

    async def _create(self, stream: bytes) -> None:
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            self._former[stream] = (0, 0)  # a new stream, perhaps of another server with another clock
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # it exists: fine
                raise
        await self._redis.expire(stream, STREAM_TTL_S)

    async def _read(self, start: str, block_ms: int | None = None) -> list[Delivery]:
        """Read all streams from `start`. Vanished streams (the server was restarted or flushed) are created again."""
        streams = dict.fromkeys(self._streams, start)
        try:
            reply: Any = await self._redis.xreadgroup(GROUP, GROUP, cast(Any, streams), count=_BATCH, block=block_ms)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            for stream in self._streams:
                await self._create(stream)
            return []
        deliveries, invalid = [], []
        for stream, entry_id, fields in ((stream, *entry) for stream, entries in reply or [] for entry in entries):
            try:
                message = decode_handoff((fields or {}).get(FIELD, b""))
            except TriptychError as error:
                log.warning("dropped a message", stream=stream.decode(), error=error.info.message)
                invalid.append((stream, entry_id))
            else:
                stale = _parse_id(entry_id) <= self._former.get(stream, (0, 0))
                deliveries.append(Delivery(stream, entry_id, message, stale))
        self.num_invalid += len(invalid)
        await self._remove(invalid)
        return deliveries

    async def _remove(self, entries: list[tuple[bytes, bytes]]) -> None:
        by_stream: dict[bytes, list[bytes]] = {}
        for stream, entry_id in entries:
            by_stream.setdefault(stream, []).append(entry_id)
        if not by_stream:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for stream, entry_ids in by_stream.items():
                pipe.xack(stream, GROUP, *entry_ids)
                pipe.xdel(stream, *entry_ids)
            await pipe.execute(raise_on_error=False)  # after a flush there is nothing left to remove


def _parse_id(entry_id: bytes) -> tuple[int, int]:
    """Parse `b"1700000000000-3"` into numbers that compare in stream order."""
    milliseconds, _, sequence = bytes(entry_id).partition(b"-")
    return int(milliseconds), int(sequence or 0)
