"""The media items of one job on their way to the decoder: which encoder has which, and who gets it next."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from common.errors import ErrorInfo, TriptychError
from common.messages import Abort, Encode, InputSlot
from proxy.jobs import Job, MediaItem
from proxy.metrics import ProxyMetrics
from proxy.router import pick_encoder
from proxy.worker import Worker
from proxy.workers import WorkerPool

MAX_ATTEMPTS: Final = 3
"""Failures in a row after which an item cannot be encoded."""
MAX_WAITS: Final = 10
"""Waits in a row that ended without room or result: in a burst that is nobody's fault, and it must drain."""
BACKOFF_S: Final = 0.25
"""Before a second attempt on the same encoder, doubled before a third; another encoder is asked at once."""
DEADLINE_GRACE_S: Final = 2.0
"""The encoder answers at its deadline; only then do we count it as silent."""


@dataclass
class _Item:
    slot: InputSlot
    media: MediaItem
    attempt: int = -1
    failures: int = 0  # in a row, as are the waits; what has been in place once may be asked for again later
    waits: int = 0
    encoder: Worker | None = None  # who has it now; None when in place
    deadline_s: float = float("inf")
    failed_on: set[str] = field(default_factory=set)
    replaced: bool = False  # sent again by us, so the decoder's own complaint about the same attempt is no news


class ItemSender:
    """Sends the items of one job to encoders, again where it must be. All its methods run on one loop.

    Every failure is counted against the item; after MAX_ATTEMPTS in a row, or MAX_WAITS waits for a busy cluster, the
    job fails with the last error.
    """

    def __init__(self, job: Job, pool: WorkerPool, metrics: ProxyMetrics, handoff_timeout_s: float) -> None:
        self._job = job
        self._pool = pool
        self._metrics = metrics
        self._timeout_s = handoff_timeout_s
        self._items = [_Item(slot, media) for slot, media in zip(job.slots, job.media, strict=True)]
        self._used: set[Worker] = set()

    @property
    def next_deadline_s(self) -> float:
        """When the next silent encoder counts as failed (Unix time)."""
        waiting = (item.deadline_s for item in self._items if item.encoder is not None)
        return min(waiting, default=float("inf")) + DEADLINE_GRACE_S

    async def send_all(self, decoder: Worker) -> None:
        """Send every item for `decoder`, again if need be: to different encoders where there are several, equal content
        to one.

        Raises TriptychError("unavailable") where there is no encoder.
        """
        for item in self._items:
            self._release(item)
            await self._send(item, decoder)

    async def on_encoded(
        self, worker: Worker, input_id: int, attempt: int, error: ErrorInfo | None, decoder: Worker
    ) -> None:
        """An encoder's reply. Raises the error where another encoder cannot do better."""
        item = self._item(input_id)
        if item is None or item.encoder is not worker or item.attempt != attempt:
            return  # about an attempt that has been given up
        self._release(item)
        if error is None:
            item.failures, item.waits, item.replaced = 0, 0, False
            item.failed_on.clear()
        elif error.code == "timeout":
            await self._wait_again(item, error, decoder, "encoder_busy")
            item.replaced = True
        elif error.code in ("unavailable", "overloaded", "internal_error"):
            await self._retry(item, worker, error, decoder, "encoder_error")
        else:
            raise TriptychError(error.code, error.message, item.media.param)

    async def on_needed(self, input_id: int, decoder: Worker) -> None:
        """The decoder asks for an input (again). Raises after too many failures in a row."""
        item = self._item(input_id)
        if item is None:
            return
        if item.replaced and item.encoder is not None:
            item.replaced = False
            return
        worker = item.encoder
        if worker is None:  # it was in place and has been taken back: no failure
            await self._again(item, decoder, "input_needed")
            return
        self._release(item)
        late = ErrorInfo("timeout", f"{worker.instance_id} did not deliver in time", item.media.param)
        await self._wait_again(item, late, decoder, "input_needed")

    async def on_gone(self, worker: Worker, decoder: Worker) -> None:
        """Give the items of a lost encoder to others. Raises where there is none."""
        self._used.discard(worker)
        for item in self._items:
            if item.encoder is worker:
                self._release(item)
                error = ErrorInfo("unavailable", f"{worker.instance_id} is gone", item.media.param)
                await self._retry(item, worker, error, decoder, "encoder_gone")

    async def expire(self, now_s: float, decoder: Worker) -> None:
        """Treat encoders that have not answered by their deadline as failed."""
        for item in self._items:
            worker = item.encoder
            if worker is not None and item.deadline_s + DEADLINE_GRACE_S <= now_s:
                self._release(item)
                limit = f"{worker.instance_id} did not answer within {self._timeout_s:g} s"
                await self._retry(item, worker, ErrorInfo("timeout", limit, item.media.param), decoder, "silent")

    def release_all(self) -> None:
        for item in self._items:
            self._release(item)

    def use(self, worker: Worker) -> bool:
        """Whether an item is under way on that encoder."""
        return any(item.encoder is worker for item in self._items)

    def abort_targets(self) -> list[tuple[Worker, Abort]]:
        """Aborts for every encoder that has been used and is still there."""
        return [(worker, Abort(self._job.request_id)) for worker in self._used if not worker.gone]

    def _item(self, input_id: int) -> _Item | None:
        return self._items[input_id] if input_id < len(self._items) else None

    async def _retry(self, item: _Item, worker: Worker, error: ErrorInfo, decoder: Worker, reason: str) -> None:
        item.failures += 1
        item.failed_on.add(worker.instance_id)
        if item.failures >= MAX_ATTEMPTS:
            raise _given_up(item, item.failures, error)
        if all(other.instance_id in item.failed_on for other in self._pool.workers("encoder", matching=decoder)):
            await asyncio.sleep(BACKOFF_S * item.failures)  # it has just failed there: give it a moment to recover
        await self._again(item, decoder, reason)
        item.replaced = True

    async def _wait_again(self, item: _Item, error: ErrorInfo, decoder: Worker, reason: str) -> None:
        item.waits += 1
        if item.waits >= MAX_WAITS:
            raise _given_up(item, item.waits, error)
        await self._again(item, decoder, reason)

    async def _again(self, item: _Item, decoder: Worker, reason: str) -> None:
        self._metrics.retries.labels(reason).inc()
        await self._send(item, decoder)

    async def _send(self, item: _Item, decoder: Worker) -> None:
        encoder = self._choose(item, decoder)
        item.attempt += 1
        item.encoder = encoder
        item.deadline_s = time.time() + self._timeout_s
        encoder.load.requests += 1
        encoder.load.size += len(item.media.data)
        self._used.add(encoder)
        await encoder.send(
            Encode(
                request_id=self._job.request_id,
                input_id=item.slot.input_id,
                attempt=item.attempt,
                kind=item.media.kind,
                content_hash=item.media.content_hash,
                media=item.media.data,
                destination=decoder.instance_id,
                deadline_s=item.deadline_s,
            )
        )

    def _choose(self, item: _Item, decoder: Worker) -> Worker:
        same = [other for other in self._items if other.media.content_hash == item.media.content_hash]
        for other in same:
            encoder = other.encoder
            if encoder is not None and not encoder.gone and encoder.instance_id not in item.failed_on:
                return encoder
        taken = {other.encoder.instance_id for other in self._items if other.encoder is not None}
        candidates = self._pool.workers("encoder", matching=decoder)
        fresh = [worker for worker in candidates if worker.instance_id not in item.failed_on] or candidates
        chosen = pick_encoder(item.media.content_hash, fresh, avoid=taken)
        if chosen is None:
            raise TriptychError("unavailable", "no encoder is ready; try again shortly", item.media.param)
        return chosen

    def _release(self, item: _Item) -> None:
        if item.encoder is not None:
            item.encoder.load.requests -= 1
            item.encoder.load.size -= len(item.media.data)
            item.encoder = None


def _given_up(item: _Item, times: int, last: ErrorInfo) -> TriptychError:
    message = f"{item.media.param} could not be encoded in {times} attempts; the last: {last.message}"
    return TriptychError(last.code, message, item.media.param)
