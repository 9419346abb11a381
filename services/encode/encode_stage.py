"""The encode stage of a worker: Encode in, Encoded out. An encoder worker is hardly more than this stage.

Each attempt is a task, from Encode until the reply. Products of an item outlive an attempt ended by the deadline or by
a newer attempt (`encode_job`): in a long queue an item needs many attempts, and computing may last longer than an
attempt. Every other end (an answer, an abort, a silent proxy) frees all memory of the item.
"""

from __future__ import annotations

import asyncio
import os
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
from common.process.child_pool import MEDIA_NICENESS
from common.telemetry import SpanRecorder, get_logger
from engine.cache.encoder_cache import OutputCache
from engine.core.encoder_engine import EncoderEngine
from engine.device.memory import staging_budget
from services.encode.encode_dedup import EncodeDedup, Owner
from services.encode.encode_job import EncodeJob
from services.encode.output_sink import OutputSink
from services.encode.preprocess_pool import PreprocessPool
from services.process.request_owners import RequestOwners
from services.worker_context import WorkerContext

MAX_HELD_BYTES: Final = 2 * 2**30
"""Limit of media, preprocessed arrays and outputs of all items; more is refused as overload."""
MAX_REMEMBERED: Final = 1024
"""Number of replies kept, to be sent again when a request is repeated."""
_SAME_END_S: Final = 0.5
"""Encoder and receiver have the same deadline: an end shortly before the deadline counts as a timeout."""
KEEP_S: Final = 2.0
"""Lifetime of an item without an attempt after a deadline: the proxy makes the next attempt at once."""
POOL_START_S: Final = 120.0

log = get_logger()


class EncodeStage:
    """Encodes items and hands outputs to `sink`. `owners`, if any, has each request from its first to its last item."""

    def __init__(
        self,
        context: WorkerContext,
        sink: OutputSink,
        prepare: Callable[[torch.Tensor], torch.Tensor],
        output_cache_bytes: int = 0,
        memory_share: float = 1.0,
        owners: RequestOwners | None = None,
    ) -> None:
        """`prepare` runs on the engine's thread and moves an output into the memory required by `sink`.

        Keep outputs of `output_cache_bytes`, outside the engine's budget. `memory_share` is the engine's part of the
        process's memory.
        """
        self._context = context
        self._sink = sink
        self._owners = owners
        settings = context.settings
        # Preprocessed arrays that may wait for grants. Other items wait with their media only.
        self._staging_bytes = staging_budget(settings.engine)
        num_workers, timeout_s = settings.preprocess_workers, settings.handoff_timeout_s
        self._pool = PreprocessPool(settings.model, context.dtype, num_workers, timeout_s, self._staging_bytes)
        self._attempts: dict[Key, asyncio.Task[bool]] = {}  # True: ended by the deadline, another attempt may follow
        self._jobs: dict[Owner, EncodeJob] = {}
        self._replies: OrderedDict[Key, Encoded] = OrderedDict()
        self._outcomes: Counter[str] = Counter()

        self.taken_bytes = 0
        """Memory of the engine beside the weights, set when the engine is loaded."""
        self._outputs = OutputCache(output_cache_bytes)
        self._dedup = EncodeDedup(
            lambda: self._build(output_cache_bytes, memory_share), prepare, self._outputs, context.metrics.batch_items
        )
        self.thread = self._dedup.thread
        self._add_metrics()

    def _build(self, cache_bytes: int, memory_share: float) -> EncoderEngine:
        os.nice(MEDIA_NICENESS)  # of this thread alone
        context = self._context
        engine = EncoderEngine(context.info, context.engine_config, context.instance_id, cache_bytes, memory_share)
        self.taken_bytes = engine.taken_bytes
        return engine

    @property
    def held_bytes(self) -> int:
        """Bytes of media and preprocessed arrays of all items under way, and of outputs waiting for delivery."""
        return self._pool.gate.held_bytes + sum(job.held_bytes for job in self._jobs.values())

    async def start(self) -> None:
        """Wait for the preprocessing processes, started beside the model."""
        await self._pool.warm_up(POOL_START_S)

    async def run(self) -> None:
        """Hand encoder outputs to their items, until cancelled."""
        await self._dedup.run()

    def submit(self, proxy: bytes, message: Encode) -> None:
        """Begin an item or a further attempt, unless known or refused as overload. The answer goes to `proxy`."""
        key, owner = key_of(message), (message.request_id, message.input_id)
        job = self._jobs.get(owner)
        if key in self._attempts or key in self._replies or (job is not None and job.attempt > message.attempt):
            self._outcomes["duplicate"] += 1
            if key in self._replies:
                self._context.send(proxy, self._replies[key])
            return
        for older in [k for k in self._attempts if k[:2] == owner]:
            self._attempts[older].cancel()
        if job is not None and job.content_hash != message.content_hash:
            self._jobs.pop(owner).discard()
            job = None
        is_new = job is None
        if job is None:
            if (refusal := self._refusal(message)) is not None:
                self._outcomes[refusal.code] += 1
                self._context.send(proxy, Encoded(*key, refusal))
                return
            job = self._jobs[owner] = EncodeJob(message, self._pool, self._dedup, self._outputs)
        job.attempt = message.attempt
        log.debug("item received", request=key[0], input=key[1], attempt=key[2], bytes=len(message.media))
        if self._owners is not None:
            self._owners.add(proxy, message.request_id, num_new_items=int(is_new))
        # Only preprocessing needs the media: the attempt must not keep them alive.
        task = asyncio.create_task(self._run(key, proxy, msgspec.structs.replace(message, media=b""), job))
        self._attempts[key] = task
        task.add_done_callback(partial(self._end, key))

    def abort(self, request_id: str) -> None:
        """Discard the items of a request, known or not; the request is the caller's to remove."""
        for key in [key for key in self._attempts if key[0] == request_id]:
            self._attempts[key].cancel()
        for owner in [owner for owner in self._jobs if owner[0] == request_id]:
            self._jobs.pop(owner).discard()

    def close(self) -> None:
        for task in self._attempts.values():
            task.cancel()
        for owner in list(self._jobs):
            self._jobs.pop(owner).discard()
        self._pool.close()

    async def _run(self, key: Key, proxy: bytes, message: Encode, job: EncodeJob) -> bool:
        """Make one attempt and reply, unless cancelled. Return whether the deadline has ended the attempt."""
        recorder = SpanRecorder(self._context.instance_id)
        error: ErrorInfo | None = None
        self._context.hops.mark(key, "encode_received")
        given_s = message.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(given_s):
                await job.run(message, self._sink, self._context.hops, recorder)
        except TriptychError as caught:
            error = caught.info
            if error.code == "unavailable" and time.monotonic() > message.deadline_s - _SAME_END_S:
                error = _late(key)  # the receiver gave up first
        except TimeoutError:
            error = _late(key)
        except Exception as caught:  # a bug: the proxy must learn of it, and the next item may succeed
            log.error("an item failed unexpectedly", key=key, exc_info=True)
            error = ErrorInfo("internal_error", f"the encoder worker failed: {type(caught).__name__}")
        late = error is not None and error.code == "timeout"
        undelivered = late and recorder.open_s("handoff") > max(0.0, given_s) / 2
        self._outcomes["ok" if error is None else "undelivered" if undelivered else error.code] += 1
        self._context.metrics.observe_spans(recorder.spans)
        reply = self._replies[key] = Encoded(*key, error, recorder.spans, undelivered)
        while len(self._replies) > MAX_REMEMBERED:
            self._replies.popitem(last=False)
        self._context.send(proxy, reply)
        log.debug("item answered", request=key[0], input=key[1], attempt=key[2], error=error and error.code)
        return late

    def _end(self, key: Key, task: asyncio.Task[bool]) -> None:
        """Keep the item of a late attempt for a while, but not its arrays without a grant if others wait for memory."""
        del self._attempts[key]
        late = not task.cancelled() and task.exception() is None and task.result()
        job = self._jobs.get(key[:2])
        if not late or (self._pool.gate.num_waiting > 0 and job is not None and job.waits_with_arrays):
            self._expire(key)
        else:
            asyncio.get_running_loop().call_later(KEEP_S, self._expire, key)

    def _expire(self, key: Key) -> None:
        """Discard the item of an attempt, unless a newer attempt has begun; a request without items has ended."""
        owner = key[0], key[1]
        job = self._jobs.get(owner)
        if job is not None and job.attempt == key[2]:
            self._jobs.pop(owner).discard()
        if self._owners is not None and not any(known[0] == key[0] for known in (*self._attempts, *self._jobs)):
            self._owners.remove(key[0])

    def _refusal(self, message: Encode) -> ErrorInfo | None:
        """Return the reason to refuse an item at once; None to accept."""
        limit, held = self._context.settings.engine.max_waiting, self.held_bytes
        if len(self._jobs) >= limit:
            what = f"{len(self._jobs)} items are under way on this encoder, the limit is {limit}"
        elif held + len(message.media) > MAX_HELD_BYTES:
            what = f"this encoder holds {held} bytes of media, the limit is {MAX_HELD_BYTES}"
        else:
            return None
        return ErrorInfo("overloaded", f"{what}: try again later")

    def _add_metrics(self) -> None:
        metrics = self._context.metrics
        metrics.gauges["encoder_items_open"] = lambda: len({*self._jobs, *(key[:2] for key in self._attempts)})
        metrics.gauges["encoder_items_computing"] = lambda: self._dedup.num_waiting
        metrics.gauges["encoder_staging_bytes"] = lambda: self._staging_bytes
        metrics.gauges["encoder_held_bytes"] = lambda: self.held_bytes
        metrics.gauges["preprocess_waiting"] = lambda: self._pool.gate.num_waiting + self._pool.num_waiting
        metrics.gauges["preprocess_crashes_total"] = lambda: self._pool.num_crashes
        metrics.gauges["encoder_items_shared_total"] = lambda: self._dedup.num_shared
        metrics.gauges["encoder_output_cache_bytes_used"] = lambda: self._outputs.used_bytes
        metrics.gauges["encoder_output_cache_hits_total"] = lambda: self._outputs.hits
        metrics.gauges["encoder_output_cache_misses_total"] = lambda: self._outputs.misses
        metrics.gauges["encoder_output_cache_evictions_total"] = lambda: self._outputs.evictions
        metrics.tallies["encodes"] = lambda: self._outcomes


def _late(key: Key) -> ErrorInfo:
    return ErrorInfo("timeout", f"input {key[1]} was not in place by its deadline")
