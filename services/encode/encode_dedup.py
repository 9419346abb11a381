"""Items on the path through the encoder's engine: equal items under way at the same time are computed once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from prometheus_client import Histogram

from broker.handoff.sender import Key
from common.errors import TriptychError
from common.telemetry import get_logger
from engine.cache.encoder_cache import OutputCache
from engine.core.encoder_engine import EncoderEngine, EncoderKey, EncoderResult
from engine.processors import ProcessedInput
from services.process.engine_thread import EngineThread

log = get_logger()

Owner: TypeAlias = tuple[str, int]
"""Request id and input id of an item, the same in every attempt."""


@dataclass
class _Computation:
    """A submission to the engine under `key`, and the items waiting for the output."""

    key: EncoderKey
    item: ProcessedInput
    waiting: dict[Owner, asyncio.Future[EncoderResult]] = field(default_factory=dict)
    early: dict[Key, Callable[[torch.Tensor], None]] = field(default_factory=dict)
    """By attempt, oldest first. Changed on the loop, read by the engine's thread."""


class EncodeDedup:
    """Submits items to the engine of `thread`; hands outputs to all waiting items, and to `outputs`."""

    def __init__(
        self,
        build: Callable[[], EncoderEngine],
        prepare: Callable[[torch.Tensor], torch.Tensor],
        outputs: OutputCache,
        batch_items: Histogram,
    ) -> None:
        """`build` and `prepare`, through which outputs pass, run on the engine's thread."""
        self.thread: EngineThread[EncoderEngine, EncoderResult] = EngineThread(
            build, self._step, next_deadline_s=lambda engine: None
        )
        self._prepare = prepare
        self._outputs = outputs
        self._batch_items = batch_items
        self._computations: dict[str, _Computation] = {}  # by content hash
        self._numbers = itertools.count()
        self.num_shared = 0

    async def run(self) -> None:
        """Hand out outputs, until cancelled."""
        while True:
            self._settle(await self.thread.events.get())  # no name, or outputs would be kept until the next batch

    @property
    def num_waiting(self) -> int:
        """Number of items waiting for an output."""
        return sum(len(computation.waiting) for computation in self._computations.values())

    def join(self, owner: Owner, content_hash: str, item: ProcessedInput) -> asyncio.Future[EncoderResult]:
        """Return a future of the item's output; a failed computation raises TriptychError there.

        A computation is cancelled once every owner has called `discard`.
        """
        computation = self._computations.get(content_hash)
        if computation is None:
            key = (content_hash, next(self._numbers), 0)
            computation = self._computations[content_hash] = _Computation(key, item)
            self.thread.submit(lambda engine: engine.submit(key, item))
        else:
            self.num_shared += 1
        done: asyncio.Future[EncoderResult] = asyncio.get_running_loop().create_future()
        computation.waiting[owner] = done
        return done

    def discard(self, owner: Owner, content_hash: str) -> None:
        """Discard a wait; unknown owners are fine, for the output may have arrived."""
        computation = self._computations.get(content_hash)
        if computation is None or computation.waiting.pop(owner, None) is None or computation.waiting:
            return
        del self._computations[content_hash]
        self.thread.submit(lambda engine: engine.cancel(computation.key))

    @contextmanager
    def sending_early(self, key: Key, content_hash: str, send: Callable[[torch.Tensor], None] | None) -> Iterator[None]:
        """Let the engine's thread call `send` with the output at once, unless an older attempt has done so."""
        computation = self._computations.get(content_hash)
        if computation is None or send is None:
            yield
            return
        computation.early[key] = send
        try:
            yield
        finally:
            del computation.early[key]

    def _step(self, engine: EncoderEngine) -> list[EncoderResult]:
        """Run one step on the engine's thread; early sends happen here."""
        results = engine.step()
        for index, result in enumerate(results):
            if result.tensor is None:
                continue
            tensor = self._prepare(result.tensor)
            results[index] = replace(result, tensor=tensor)
            computation = self._computations.get(result.key[0])
            if computation is None or computation.key != result.key:
                continue
            for send in list(computation.early.values())[:1]:  # `list` is atomic: the loop may change it meanwhile
                try:
                    send(tensor)
                except Exception:  # the output can be sent in the ordinary manner: no reason to end an engine
                    log.error("an output did not leave early", exc_info=True)
        return results

    def _settle(self, results: list[EncoderResult]) -> None:
        """Hand out the results of a batch; discard outputs without a waiting item."""
        self._batch_items.observe(len(results))
        for result in results:
            content_hash = result.key[0]
            computation = self._computations.get(content_hash)
            if computation is None or computation.key != result.key:
                continue
            del self._computations[content_hash]
            if result.tensor is not None:
                self._outputs.put(content_hash, computation.item, result.tensor)
            for done in computation.waiting.values():
                if done.done():
                    continue
                if result.error is None:
                    done.set_result(result)
                else:  # an exception for each item: a traceback grows where it is raised
                    done.set_exception(TriptychError(result.error.code, result.error.message, result.error.param))
