"""What an encoder has made of one item so far: it outlives the attempts to bring that to where it is needed.

An attempt ends with a deadline of the proxy's, so that a silent encoder is told from a busy one. What it has waited for
in this encoder's own lines goes on meanwhile, and the next attempt finds it where it is: in line, preprocessed, being
computed, or computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from broker.handoff.sender import Key
from common.messages import Encode, MediaKind
from engine.cache.output_cache import OutputCache
from engine.processors import ProcessedInput
from services.encode.encode_dedup import EncodeDedup, Encoding
from services.encode.memory_gate import MemoryGate, MemoryTicket
from services.encode.preprocess_pool import PreprocessPool


class PreprocessQueue:
    """The way from media to what the engine takes: room for it first, then a process that makes it."""

    def __init__(self, pool: PreprocessPool, room: MemoryGate) -> None:
        self.pool = pool
        self.room = room
        self.held_bytes = 0
        """Media that wait."""
        self.computed_bytes = 0
        """Outputs that wait; what several items share is counted for each."""

    async def run(self, kind: MediaKind, media: bytes) -> tuple[ProcessedInput, MemoryTicket]:
        """One item, which takes its place until that is left; nothing is left of it where this raises."""
        with self._holding(len(media)):
            place = await self.room.enter()
            try:
                item = await self.pool.process(kind, media)
                place.weigh(sum(array.nbytes for array in item.arrays.values()))
            except BaseException:
                place.leave()
                raise
            return item, place

    @contextmanager
    def _holding(self, num_bytes: int) -> Iterator[None]:
        self.held_bytes += num_bytes
        try:
            yield
        finally:
            self.held_bytes -= num_bytes


class EncodeWork:
    """One item of one request: preprocessed and computed once, whichever attempt asks for it; `attempt` is the newest.

    An output of equal content that has been kept is as good. Nothing is left of it after `drop`.
    """

    def __init__(
        self, message: Encode, preparation: PreprocessQueue, encoding: EncodeDedup, outputs: OutputCache
    ) -> None:
        self.attempt = message.attempt
        self.content_hash = message.content_hash
        self._owner = message.request_id, message.input_id
        self._encoding = encoding
        self._outputs = outputs
        self._preparation = preparation
        self._computed_bytes = 0
        self._dropped = False
        self._kept = outputs.lend(message.content_hash)
        self._item = None if self._kept is None else self._kept.item
        self._place: MemoryTicket | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._computing: asyncio.Future[Encoding] | None = None
        if self._kept is None:
            self._preparing = asyncio.create_task(self._prepare(preparation, message.kind, message.media))
            self._preparing.add_done_callback(_retrieve)

    @property
    def item(self) -> ProcessedInput:
        """What `prepared` has waited for; without its arrays, once they are not needed any more."""
        assert self._item is not None
        return self._item

    @property
    def kept(self) -> torch.Tensor | None:
        """The output, where it need not be computed."""
        return None if self._kept is None else self._kept.tensor

    @property
    def is_prepared(self) -> bool:
        return self._item is not None

    @property
    def waits_with_arrays(self) -> bool:
        """Whether it is preprocessed, and nobody has room for the output yet."""
        return self._place is not None and self._computing is None

    async def prepared(self) -> None:
        """Wait until the item is preprocessed. Raises TriptychError where it cannot be."""
        if self._preparing is not None:
            await asyncio.shield(self._preparing)

    async def computed(self, key: Key, early: Callable[[], Callable[[torch.Tensor], None] | None]) -> Encoding:
        """The output, computed from now on at the latest. Raises TriptychError saying why there is none.

        Where it is not there yet, what `early` returns gets it first, for attempt `key`: see EncodeDedup.
        """
        if self._computing is not None and self._computing.done():
            return self._computing.result()
        send = early()
        if self._computing is None:
            self._computing = self._encoding.join(self._owner, self.content_hash, self.item)
            self._computing.add_done_callback(self._forget_arrays)
        with self._encoding.leaving_early(key, self.content_hash, send):
            return await asyncio.shield(self._computing)

    def drop(self) -> None:
        """Nobody needs it any more."""
        if self._preparing is not None:
            self._preparing.cancel()
        if self._computing is not None:
            self._encoding.quit(self._owner, self.content_hash)
            self._computing.cancel()
        if self._kept is not None:
            self._outputs.give_back(self.content_hash)
        self._preparation.computed_bytes -= self._computed_bytes
        self._dropped = True
        self._leave()

    async def _prepare(self, preparation: PreprocessQueue, kind: MediaKind, media: bytes) -> None:
        self._item, self._place = await preparation.run(kind, media)

    def _forget_arrays(self, computing: asyncio.Future[Encoding]) -> None:
        _retrieve(computing)
        if not self._dropped and not computing.cancelled() and computing.exception() is None:
            self._computed_bytes = computing.result().tensor.nbytes
            self._preparation.computed_bytes += self._computed_bytes
        self._item = replace(self.item, arrays={})
        self._leave()

    def _leave(self) -> None:
        if self._place is not None:
            self._place.leave()


def _retrieve(done: asyncio.Future[None] | asyncio.Future[Encoding]) -> None:
    """It may fail while there is no attempt that waits for it: the next one is told."""
    if not done.cancelled():
        done.exception()
