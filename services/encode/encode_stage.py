"""The encode stage of a worker: Encode in, Encoded out. An encoder worker is hardly more than this.

Each attempt is one task, from Encode until its reply. What has been made of its item outlives one that ended by its
deadline, or by a newer one (`encode_work`): in a long line it takes many, and an item may take longer to
compute than an attempt lasts. Every other end (an answer, an abort, a silent proxy) frees whatever the item holds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import torch

from broker.handoff.sender import Key, key_of
from common.errors import ErrorInfo, TriptychError
from common.messages import Encode, Encoded
from common.telemetry import SpanRecorder, get_logger
from engine.cache.output_cache import OutputCache, in_memory_of_its_own
from engine.core.encoder_engine import EncoderEngine
from services.encode.encode_dedup import EncodingOutcome, Owner
from services.encode.encode_work import EncodeWork
from services.encode.item_pipeline import EncodeJob, encode_step
from services.encode.output_sink import OutputSink
from services.encode.preprocess_pool import PreprocessPool
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext

MAX_HELD_BYTES: Final = 2 * 2**30
"""Media and preprocessed arrays of all items; more is refused as overload."""
MAX_REMEMBERED: Final = 1024
"""Replies kept, to be sent again when their request is repeated."""
_SAME_END_S: Final = 0.5
"""An encoder and a destination give up at the same deadline, one before the other: what ends then has ended by it."""
KEEP_S: Final = 2.0
"""What was not in place by its deadline goes on for so long without another attempt: the proxy makes one at once."""
POOL_START_S: Final = 120.0

log = get_logger()


class EncodeStage:
    """Encodes items and hands them to `destination`.

    `on_begun` is called with proxy and request id before an item's task starts, `on_ended` with the request id when the
    last item of a request has ended.
    """

    def __init__(
        self,
        links: WorkerContext,
        destination: OutputSink,
        prepare: Callable[[torch.Tensor], torch.Tensor],
        output_cache_bytes: int = 0,
        memory_share: float = 1.0,
        on_begun: Callable[[bytes, str], None] = lambda proxy, request_id: None,
        on_ended: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """`prepare` puts an output where `destination` wants it; it runs on the engine's thread.

        Outputs of `output_cache_bytes` at most are kept, in memory that the engine leaves to them. `memory_share` is
        the engine's part of what this process may take; the rest is for a decoder beside it.
        """
        self._links = links
        self._on_begun = on_begun
        self._on_ended = on_ended
        settings = links.settings
        self._pool = PreprocessPool(
            settings.model, links.dtype, settings.preprocess_workers, settings.handoff_timeout_s
        )
        self._items: dict[Key, asyncio.Task[bool]] = {}  # whether there is to be another attempt
        self._works: dict[Owner, EncodeWork] = {}
        self._replies: OrderedDict[Key, Encoded] = OrderedDict()
        self._outcomes: Counter[str] = Counter()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return prepare(in_memory_of_its_own(tensor) if output_cache_bytes else tensor)

        self.thread: EngineThread[EncoderEngine, EncodingOutcome] = EngineThread(
            build=lambda: self._build(output_cache_bytes, memory_share),
            step=lambda engine: encode_step(engine, keep, self._pipeline.encoding.leave),
            next_deadline_s=lambda engine: None,
            on_events=self._settle,
        )
        self.taken_bytes = 0
        """What the engine takes beside its weights, once it is loaded."""
        self._outputs = OutputCache(output_cache_bytes)
        self._pipeline = EncodeJob(links, self._pool, self.thread, destination, self._outputs)
        self._add_metrics()

    def _build(self, output_cache_bytes: int, memory_share: float) -> EncoderEngine:
        links = self._links
        config = links.engine_config
        engine = EncoderEngine(links.info, config, links.instance_id, output_cache_bytes, memory_share)
        self.taken_bytes = engine.taken_bytes
        return engine

    async def start(self) -> None:
        """Wait for the preprocessing processes, which have been starting beside the model."""
        await self._pool.warm_up(POOL_START_S)

    def take(self, proxy: bytes, message: Encode) -> None:
        """Begin with an item or go on with it, unless this is known or there is no room. The answer goes to `proxy`."""
        key, owner = key_of(message), (message.request_id, message.input_id)
        work = self._works.get(owner)
        if key in self._items or key in self._replies or (work is not None and work.attempt > message.attempt):
            self._outcomes["duplicate"] += 1
            if key in self._replies:
                self._links.send(proxy, self._replies[key])
            return
        for older in [k for k in self._items if k[:2] == owner]:
            self._items[older].cancel()
        if work is not None and work.content_hash != message.content_hash:
            self._drop(owner)
            work = None
        if work is None:
            refusal = self._refusal(message)
            if refusal is not None:
                self._outcomes[refusal.code] += 1
                self._links.send(proxy, Encoded(*key, refusal))
                return
            work = self._works[owner] = self._pipeline.begin(message)
        work.attempt = message.attempt
        self._on_begun(proxy, message.request_id)
        # The media are held by what preprocesses them alone.
        task = asyncio.create_task(self._run(key, proxy, msgspec.structs.replace(message, media=b""), work))
        self._items[key] = task
        task.add_done_callback(partial(self._end, key))

    def abort(self, request_id: str) -> None:
        """Drop the items of a request, known or not."""
        for key in [key for key in self._items if key[0] == request_id]:
            self._items[key].cancel()
        for owner in [owner for owner in self._works if owner[0] == request_id]:
            self._drop(owner)
        self._tell_if_ended(request_id)

    def close(self) -> None:
        for task in self._items.values():
            task.cancel()
        for owner in list(self._works):
            self._drop(owner)
        self._pool.close()

    async def _run(self, key: Key, proxy: bytes, message: Encode, work: EncodeWork) -> bool:
        """From Encode to Encoded; a cancelled attempt is not answered, for nobody waits for it.

        Returns whether its deadline has ended it.
        """
        recorder = SpanRecorder(self._links.instance_id)
        error: ErrorInfo | None = None
        self._links.hops.mark(key, "encode_received")
        given_s = message.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(given_s):
                await self._pipeline.run(key, message, work, recorder)
        except TriptychError as caught:
            error = caught.info
            if error.code == "unavailable" and time.monotonic() > message.deadline_s - _SAME_END_S:
                error = _late(key)  # the destination was first
        except TimeoutError:
            error = _late(key)
        except Exception as caught:  # a mistake of ours: the proxy must learn of it, and the next item may do better
            log.error("an item failed unexpectedly", key=key, exc_info=True)
            error = ErrorInfo("internal_error", f"the encoder worker failed: {type(caught).__name__}")
        late = error is not None and error.code == "timeout"
        undelivered = late and recorder.open_s("handoff") > max(0.0, given_s) / 2
        self._outcomes["ok" if error is None else "undelivered" if undelivered else error.code] += 1
        self._links.metrics.observe_spans(recorder.spans)
        reply = self._replies[key] = Encoded(*key, error, recorder.spans, undelivered)
        while len(self._replies) > MAX_REMEMBERED:
            self._replies.popitem(last=False)
        self._links.send(proxy, reply)
        return late

    def _end(self, key: Key, task: asyncio.Task[bool]) -> None:
        del self._items[key]
        goes_on = not task.cancelled() and task.exception() is None and task.result()
        if not goes_on or (self._is_in_the_way(key)):
            self._let_go(key)  # or it would keep from being preprocessed what somebody else has room for
        else:
            asyncio.get_running_loop().call_later(KEEP_S, self._let_go, key)

    def _is_in_the_way(self, key: Key) -> bool:
        """Whether it waits, preprocessed, for somebody else's room, and others for memory to be preprocessed into."""
        work = self._works.get(key[:2])
        return work is not None and work.waits_with_arrays and self._pipeline.is_crowded

    def _let_go(self, key: Key) -> None:
        """There is no other attempt after this one, if there is none yet."""
        owner = key[0], key[1]
        work = self._works.get(owner)
        if work is not None and work.attempt == key[2]:
            self._drop(owner)
        self._tell_if_ended(key[0])

    def _drop(self, owner: Owner) -> None:
        self._works.pop(owner).drop()

    def _tell_if_ended(self, request_id: str) -> None:
        if not any(known[0] == request_id for known in (*self._items, *self._works)):
            self._on_ended(request_id)

    def _settle(self, outcomes: list[EncodingOutcome]) -> None:
        self._links.metrics.batch_items.observe(len(outcomes))
        self._pipeline.encoding.settle(outcomes)

    def _refusal(self, message: Encode) -> ErrorInfo | None:
        """Why an item is not even begun; None if it is."""
        limit, held = self._links.settings.engine.max_waiting, self._pipeline.held_bytes
        if len(self._works) >= limit:
            what = f"{len(self._works)} items are under way on this encoder, the limit is {limit}"
            return ErrorInfo("overloaded", f"{what}: try again later")
        if held + len(message.media) > MAX_HELD_BYTES:
            what = f"this encoder holds {held} bytes of media, the limit is {MAX_HELD_BYTES}"
            return ErrorInfo("overloaded", f"{what}: try again later")
        return None

    def _add_metrics(self) -> None:
        metrics = self._links.metrics
        metrics.gauges["encoder_items_open"] = lambda: len({*self._works, *(key[:2] for key in self._items)})
        metrics.gauges["encoder_items_computing"] = lambda: self._pipeline.encoding.num_waiting
        metrics.gauges["encoder_staging_bytes"] = lambda: self._pipeline.staging_bytes
        metrics.gauges["encoder_held_bytes"] = lambda: self._pipeline.held_bytes
        metrics.gauges["preprocess_waiting"] = lambda: self._pipeline.num_waiting
        metrics.gauges["preprocess_crashes_total"] = lambda: self._pool.num_crashes
        metrics.gauges["encoder_items_shared_total"] = lambda: self._pipeline.encoding.num_shared
        metrics.gauges["encoder_output_cache_bytes_used"] = lambda: self._outputs.used_bytes
        metrics.gauges["encoder_output_cache_hits_total"] = lambda: self._outputs.hits
        metrics.gauges["encoder_output_cache_misses_total"] = lambda: self._outputs.misses
        metrics.gauges["encoder_output_cache_evictions_total"] = lambda: self._outputs.evictions
        metrics.tallies["encodes"] = lambda: self._outcomes


def _late(key: Key) -> ErrorInfo:
    return ErrorInfo("timeout", f"input {key[1]} was not in place by its deadline")
