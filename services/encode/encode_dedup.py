"""Items on their way through the encoder: equal ones that are under way at the same time are computed once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from broker.handoff.sender import Key
from common.errors import TriptychError
from common.telemetry import get_logger
from engine.cache.output_cache import OutputCache
from engine.core.encoder_engine import EncoderEngine
from engine.processors import ProcessedInput
from engine.scheduler.encoder import EncoderKey
from services.process.engine_thread import EngineThread

log = get_logger()


@dataclass(frozen=True)
class Encoding:
    """An encoder's output. Its times (Unix) are those of its batch."""

    tensor: torch.Tensor
    start_s: float
    end_s: float


EncodingOutcome = tuple[EncoderKey, Encoding | TriptychError]
Owner: TypeAlias = tuple[str, int]
"""Request id and input id: whose item it is, in whichever attempt."""


@dataclass
class _Computation:
    """What the engine knows as `key`, and the items that wait for it."""

    key: EncoderKey
    item: ProcessedInput
    waiting: dict[Owner, asyncio.Future[Encoding]] = field(default_factory=dict)
    early: dict[Key, Callable[[torch.Tensor], None]] = field(default_factory=dict)
    """Of attempts of those who wait."""


class EncodeDedup:
    """Submits items to the engine that `thread` drives, and hands their outputs to all who wait, and to `outputs`."""

    def __init__(self, thread: EngineThread[EncoderEngine, EncodingOutcome], outputs: OutputCache) -> None:
        self._thread = thread
        self._outputs = outputs
        self._computations: dict[str, _Computation] = {}  # by content hash
        self._early: dict[EncoderKey, Callable[[torch.Tensor], None]] = {}  # one of each; taken by the engine's thread
        self._numbers = itertools.count()
        self.num_shared = 0

    @property
    def num_waiting(self) -> int:
        """Items that wait for their outputs."""
        return sum(len(computation.waiting) for computation in self._computations.values())

    def join(self, owner: Owner, content_hash: str, item: ProcessedInput) -> asyncio.Future[Encoding]:
        """The output of an item, once it is computed, or a TriptychError saying why there is none.

        Where nobody waits for a computation any more, because all have `quit`, it is taken back.
        """
        computation = self._computations.get(content_hash)
        if computation is None:
            computation = self._begin(content_hash, item)
        else:
            self.num_shared += 1
        done: asyncio.Future[Encoding] = asyncio.get_running_loop().create_future()
        computation.waiting[owner] = done
        return done

    def quit(self, owner: Owner, content_hash: str) -> None:
        """This one does not wait any more; unknown ones are fine, they may have been told."""
        computation = self._computations.get(content_hash)
        if computation is None or computation.waiting.pop(owner, None) is None or computation.waiting:
            return
        del self._computations[content_hash]
        self._early.pop(computation.key, None)
        self._thread.submit(lambda engine: engine.cancel(computation.key))

    @contextmanager
    def leaving_early(self, key: Key, content_hash: str, send: Callable[[torch.Tensor], None] | None) -> Iterator[None]:
        """Meanwhile `send` is called with the output on the engine's thread as soon as it is there, unless that of an
        attempt that has waited for longer is."""
        computation = self._computations.get(content_hash)
        if computation is None or send is None:
            yield
            return
        computation.early[key] = send
        self._choose_early(computation)
        try:
            yield
        finally:
            del computation.early[key]
            self._choose_early(computation)

    def leave(self, key: EncoderKey, tensor: torch.Tensor) -> None:
        """On the engine's thread, with what it has made: for the one who wants it at once."""
        early = self._early.pop(key, None)
        if early is not None:
            try:
                early(tensor)
            except Exception:  # it can be sent in the ordinary way: nothing that an engine should end for
                log.error("an output did not leave early", exc_info=True)

    def settle(self, outcomes: Iterable[EncodingOutcome]) -> None:
        """The engine has finished a batch. Outputs that nobody waits for any more are dropped."""
        for key, outcome in outcomes:
            content_hash = key[0]
            computation = self._computations.get(content_hash)
            if computation is None or computation.key != key:
                continue
            del self._computations[content_hash]
            if isinstance(outcome, Encoding):
                self._outputs.put(content_hash, computation.item, outcome.tensor)
            for done in computation.waiting.values():
                _tell(done, outcome)

    def _choose_early(self, computation: _Computation) -> None:
        first = next(iter(computation.early.values()), None)
        if first is None:
            self._early.pop(computation.key, None)
        else:
            self._early[computation.key] = first  # in vain where the engine is done with it

    def _begin(self, content_hash: str, item: ProcessedInput) -> _Computation:
        key = (content_hash, next(self._numbers), 0)
        self._thread.submit(lambda engine: engine.submit(key, item))
        computation = self._computations[content_hash] = _Computation(key, item)
        return computation


def _tell(done: asyncio.Future[Encoding], outcome: Encoding | TriptychError) -> None:
    if done.done():
        return
    if isinstance(outcome, Encoding):
        done.set_result(outcome)
    else:  # each has one of its own: a traceback grows where it is raised
        done.set_exception(TriptychError(outcome.info.code, outcome.info.message, outcome.info.param))
