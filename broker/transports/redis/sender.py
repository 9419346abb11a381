"""Tensors through the broker, for processes that reach only Redis. All other transports are faster.

    sender                               broker                              receiver
    announce    -- Passing ------------> list of the receiver -------------> begins to take it
    push        -- chunk, WINDOW at most -> a key of its own --------------> takes it
                <- number, at last done -- a list of answers <-------------- says which it waits for
    renew       -- now and then -------> all these keys

The broker may lose any answer or chunk, in a reply that did not arrive. After a silent second the sender announces the
tensor again, learns the number of the awaited chunk, and sends that chunk again. A command with a lost reply is
repeated, and may have been executed before: so each chunk has a key of its own, and a tensor announced twice is
received once.

All keys (see wire) are a lease, which ends unless the sender renews it: no death leaves anything. A lease ends
too early where sender or broker stood still, or the broker was emptied. Then the sender begins a new lease and goes on
at the receiver's chunk. After a longer absence the receiver has abandoned the tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from typing import ClassVar, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from broker.transports.base import sending
from broker.transports.checksums import with_checksum
from broker.transports.redis import wire
from broker.transports.redis.wire import Parcel, Passing
from common.errors import TriptychError
from common.messages import TensorHeader

_NUMBER: Final = re.compile(rb"\d{1,9}")


class RedisConnection:
    """See broker.transports.base.Connection. `send` returns once the receiver has all of a tensor, one at a time."""

    scheme: ClassVar[str] = wire.SCHEME

    def __init__(self, redis: Redis, address: str) -> None:
        self._redis = redis
        self._address = address
        self._list = address.partition("://")[2]
        self._turn = asyncio.Lock()
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def send(self, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        header = await with_checksum(header, data)
        passing = Passing(secrets.token_hex(8), data.nbytes, min(timeout_s, wire.MAX_TIMEOUT_S), header)
        parcel = Parcel(self._redis, self._list, passing)
        try:
            async with sending(self._address, timeout_s), self._turn:
                await self._pass(parcel, _Chunks(data))
        except RedisError as error:
            raise TriptychError("unavailable", f"the broker does not take a tensor: {error}") from error

    def close(self) -> None:
        """Close the connection, after the receiver's end or the last send: a running send fails within a second."""
        self._closed = True

    async def _pass(self, parcel: Parcel, chunks: _Chunks) -> None:
        self._require_open()
        try:
            await parcel.announce()
            renewing = asyncio.create_task(_renew(parcel, chunks))
            try:
                while not await self._go_on(parcel, chunks):
                    self._require_open()
            finally:
                renewing.cancel()
        finally:  # in the background: who has given up has no time left
            task = asyncio.create_task(_remove(parcel, chunks.maybe_there))
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

    async def _go_on(self, parcel: Parcel, chunks: _Chunks) -> bool:
        """Send the chunks to send now, and process an answer; return True once the receiver has all chunks."""
        for number in chunks.next():
            await parcel.push(number, chunks[number])
        answer = await parcel.pop("taken")
        if answer == wire.REFUSED:
            message = f"{self._address} refused a tensor of {parcel.passing.size_bytes} bytes"
            raise TriptychError("invalid_request", message)
        if answer == wire.LOST:
            raise TriptychError("unavailable", f"{self._address} has given up a tensor")
        if answer is None:
            chunks.asked = True
            await parcel.ask()
        elif answer != wire.DONE:
            chunks.note_waits_for(answer)
        return answer == wire.DONE

    def _require_open(self) -> None:
        if self._closed:
            raise TriptychError("unavailable", f"the connection to {self._address} is closed")


async def _renew(parcel: Parcel, chunks: _Chunks) -> None:
    """Renew the lease during a send. An expired lease, as after a stopped broker, begins anew."""
    while True:
        await asyncio.sleep(wire.RENEWAL_S)
        with contextlib.suppress(RedisError):  # away for a moment; or for longer, which shows when it is back
            if not await parcel.renew(chunks.maybe_there):
                chunks.num_sent = chunks.waits_for
                await parcel.announce()


async def _remove(parcel: Parcel, chunks: range) -> None:
    # What cannot be removed expires. The second error is redis-py's where the client is closed amid a command.
    with contextlib.suppress(RedisError, AttributeError):
        await parcel.remove(chunks)


class _Chunks:
    """The bytes of a tensor in parts. The first `num_sent` are sent, and those before `waits_for` have arrived.

    `asked`: the receiver will name the awaited chunk, to be sent again if it was sent already.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._num_chunks = -(-len(data) // wire.CHUNK_BYTES)
        self.num_sent = self.waits_for = 0
        self.asked = False
        self._again: list[int] = []

    def __getitem__(self, number: int) -> memoryview:
        return self._data[number * wire.CHUNK_BYTES : (number + 1) * wire.CHUNK_BYTES]

    @property
    def maybe_there(self) -> range:
        """Chunks possibly in the broker."""
        return range(self.waits_for, min(self.waits_for + wire.WINDOW, self._num_chunks))

    def next(self) -> list[int]:
        """Return the chunks to send now, counted as sent from now on."""
        again, self._again = self._again, []
        first, self.num_sent = self.num_sent, max(self.num_sent, self.maybe_there.stop)
        return [*again, *range(first, self.num_sent)]

    def note_waits_for(self, answer: bytes) -> None:
        """Note the chunk awaited by the receiver. Raises TriptychError for an invalid chunk number."""
        if not _NUMBER.fullmatch(answer) or int(answer) > self._num_chunks:
            raise TriptychError("unavailable", f"the receiver of a tensor says {answer[:40]!r}")
        number = int(answer)
        if self.asked and number == self.waits_for < self.num_sent:
            self._again = [number]
        self.asked = False
        self.waits_for = max(self.waits_for, number)
        self.num_sent = max(self.num_sent, self.waits_for)
