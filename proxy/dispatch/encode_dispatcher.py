"""The media items of one job on their way to whoever reads them: which encoder has which, and who gets it next."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from common.errors import ErrorInfo, TriptychError
from common.messages import Abort, Encode, Encoded, InputNeeded, InputSlot
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.jobs import Job, MediaItem
from proxy.dispatch.placement import anybody_encodes
from proxy.dispatch.retries import Retries
from proxy.dispatch.router import FREE_ITEMS, outstanding_items, pick_encoder
from proxy.dispatch.worker import Worker

CROWDED: Final = 2
"""An encoder with so many times the items of another one, and FREE_ITEMS more, is left by one that waits there."""


@dataclass
class _Item:
    """With an encoder it is under way; with a finite `due_s` it waits to be sent; else it is in place."""

    slot: InputSlot
    media: MediaItem
    retries: Retries
    attempt: int = -1
    destination: Worker | None = None
    request_attempt: int = 0  # of the job, at the destination
    encoder: Worker | None = None
    sent_s: float = 0.0  # to the encoder
    deadline_s: float = math.inf  # of the encoder
    silent_s: float = math.inf  # without an answer until then it has failed: its deadline begins when it is reached
    due_s: float = math.inf
    replaced: bool = False  # sent again after a failure, though what failed may have arrived
    has_left: bool = False  # an encoder that had too much to do, and that would have gone on with it

    @property
    def next_deadline_s(self) -> float:
        return self.due_s if self.encoder is None else self.silent_s


class EncodeDispatcher:
    """Sends the items of one job to encoders, again where it must be. All its methods run on one loop.

    Every failure is counted against the item; where it is one too many the job fails with the last error. An encoder
    that says in time that it is not done is asked again for as long as the job lasts: it goes on with what it has made
    of the item. The last resort is the destination itself where it can encode. An item that nobody can encode at the
    moment waits for an encoder to come back, as long as one was there a moment ago. Whatever may have to wait does so
    by `expire`, to be called at `next_deadline_s`.
    """

    def __init__(self, job: Job, cluster: DispatchContext) -> None:
        self._job = job
        self._cluster = cluster
        self._items = [
            _Item(slot, media, Retries(f"{media.param} could not be encoded", media.param))
            for slot, media in zip(job.slots, job.media, strict=True)
        ]
        self._used: set[Worker] = set()
        self._given_up: set[tuple[Worker, int, int]] = set()  # attempts without a reply that nobody waits for any more

    @property
    def next_deadline_s(self) -> float:
        """When `expire` has something to do (by `time.monotonic`)."""
        return min((item.next_deadline_s for item in self._items), default=math.inf)

    async def send_all(self, destination: Worker, request_attempt: int) -> None:
        """Send every item to `destination`, which has the job in that attempt, again if need be: by different encoders
        where there are several, equal content by one.

        Raises TriptychError("unavailable") where nobody encodes.
        """
        self.recall()
        for item in self._items:
            item.destination, item.request_attempt = destination, request_attempt
            await self._place(item)

    def recall(self) -> None:
        """Nobody wants the items any more, until the next `send_all`."""
        for item in self._items:
            self._give_up(item)
            item.due_s = math.inf

    def read(self, reader: Worker) -> None:
        """`reader` has had all that was for it, whatever is still to be told of that: it wants nothing again."""
        for item in self._items:
            if item.destination is not reader:
                continue
            if item.replaced:  # perhaps it has read what an earlier attempt sent: this one may run for nothing
                self._give_up(item)
            self._succeeded(item)
            item.due_s = math.inf

    async def finish(self) -> None:
        """The job has been answered. What was given up, perhaps for another encoder, may still run for nothing: it
        stops. A last reply that is only late does not matter.
        """
        for worker in {worker for worker, _, _ in self._given_up}:
            await worker.tell(Abort(self._job.request_id))
        for item in self._items:
            self._release(item)
            item.due_s = math.inf

    async def on_encoded(self, worker: Worker, reply: Encoded) -> None:
        """An encoder's reply. Raises its error where another encoder cannot do better."""
        self._given_up.discard((worker, reply.input_id, reply.attempt))
        item, error = self._item(reply.input_id), reply.error
        if item is None or item.encoder is not worker or item.attempt != reply.attempt:
            return  # about an attempt that has been given up
        if error is None:
            self._succeeded(item)
            return
        self._release(item)
        if error.code == "timeout":
            item.replaced = True
            reason = "undelivered" if reply.undelivered else "encoder_busy"
            await self._wait_again(item, worker, error, reason, undelivered=reply.undelivered)
        elif error.retryable or error.code == "internal_error":
            await self._retry(item, worker, error, "encoder_error")
        else:
            raise TriptychError(error.code, error.message, item.media.param)

    async def on_needed(self, destination: Worker, message: InputNeeded) -> None:
        """`destination` asks for an input (again). Raises after too many failures in a row."""
        input_id, request_attempt = message.input_id, message.request_attempt
        item = self._item(input_id)
        if item is None:
            return
        if (item.destination, item.request_attempt) != (destination, request_attempt):  # it was sent to somebody else
            self._give_up(item)
            item.destination, item.request_attempt = destination, request_attempt
            await self._again(item, "input_needed")
        elif item.encoder is not None and message.attempt < item.attempt:
            return  # it does not know yet that another attempt is under way
        elif item.encoder is not None:
            encoder = item.encoder
            late = ErrorInfo("timeout", f"{encoder.instance_id} did not deliver in time", item.media.param)
            self._give_up(item)
            await self._wait_again(item, encoder, late, "input_needed")
        elif item.due_s == math.inf:  # it was in place and has been taken back: no failure
            await self._again(item, "input_needed")

    async def on_gone(self, worker: Worker) -> None:
        """Give the items of a lost encoder to others. Raises where there is none."""
        self._used.discard(worker)
        for item in self._items:
            if item.encoder is worker:
                self._release(item)
                error = ErrorInfo("unavailable", f"{worker.instance_id} is gone", item.media.param)
                await self._retry(item, worker, error, "encoder_gone")

    async def on_failed(self, worker: Worker, error: ErrorInfo) -> None:
        """An encoder has dropped all items of the job: it had lost us for a while. Raises where nobody takes them."""
        for item in self._items:
            if item.encoder is worker:
                self._give_up(item)  # the last attempt may have reached it after those that it has dropped
                await self._retry(item, worker, error, "encoder_error")

    async def on_joined(self) -> None:
        """There is a new worker: send what nobody could take."""
        for item in self._items:
            if item.encoder is None and item.due_s < math.inf:
                await self._place(item)

    async def expire(self, now_s: float) -> None:
        """Treat encoders that have not answered as failed, and send what is due."""
        for item in self._items:
            worker = item.encoder
            if item.next_deadline_s > now_s:
                continue
            if worker is None:
                await self._place(item)
                continue
            self._give_up(item)
            limit = f"{worker.instance_id} did not answer within {self._cluster.handoff_timeout_s:g} s"
            await self._retry(item, worker, ErrorInfo("timeout", limit, item.media.param), "silent")

    @property
    def stranded(self) -> bool:
        """Whether an item waits for an encoder while there is none."""
        waiting = (item for item in self._items if item.encoder is None and item.due_s < math.inf)
        return any(not self._able(item) for item in waiting)

    def use(self, worker: Worker) -> bool:
        """Whether an item is under way on that encoder."""
        return any(item.encoder is worker for item in self._items)

    @property
    def used(self) -> set[Worker]:
        """Every encoder that has been given an item and is still there."""
        return set(self._used)

    def _item(self, input_id: int) -> _Item | None:
        return self._items[input_id] if input_id < len(self._items) else None

    async def _retry(self, item: _Item, worker: Worker, error: ErrorInfo, reason: str) -> None:
        item.retries.failed(worker.instance_id, error)
        item.replaced = True
        able = self._able(item)
        if able and all(other.instance_id in item.retries.failed_on for other in able):
            self._cluster.metrics.retries.labels(reason).inc()
            item.due_s = time.monotonic() + item.retries.backoff_s
        else:
            await self._again(item, reason)

    async def _wait_again(
        self, item: _Item, worker: Worker, error: ErrorInfo, reason: str, *, undelivered: bool = False
    ) -> None:
        in_full = self._cluster.is_full_wait(item.sent_s)  # it waits for what others need, too
        ends_early = not in_full and item.retries.waits > 0  # again: another one may be better
        undelivered_by = worker.instance_id if undelivered or ends_early else None
        item.retries.waited(error, in_full=in_full, undelivered_by=undelivered_by)
        await self._again(item, reason, at=worker if in_full and not undelivered else None)

    async def _again(self, item: _Item, reason: str, at: Worker | None = None) -> None:
        self._cluster.metrics.retries.labels(reason).inc()
        await self._place(item, at)

    async def _place(self, item: _Item, at: Worker | None = None) -> None:
        """Send it to an encoder, to `at` if it may stay there, or wait for one."""
        encoder = at if at is not None and self._stays(item, at) else self._choose(item)
        destination = item.destination
        assert destination is not None
        now_s = time.monotonic()
        if encoder is None:
            pool = self._cluster.pool
            left_s = self._cluster.patience_s(pool.absent_s("encoder", matching=destination))
            if left_s <= 0 and not anybody_encodes(pool):
                raise TriptychError("unavailable", "no encoder is ready; try again shortly", item.media.param)
            item.due_s = now_s + max(0.0, left_s)  # it is stranded: the job may go where it can be encoded
            return
        if encoder is destination and encoder.record.role != "encode_prefill_decode":
            self._cluster.metrics.encoder_fallbacks.inc()
        item.due_s = math.inf
        item.attempt += 1
        item.encoder = encoder
        item.sent_s, item.deadline_s = now_s, now_s + self._cluster.handoff_timeout_s
        item.silent_s = item.deadline_s + self._cluster.handoff_timeout_s  # large media may be long on their way
        encoder.load.items += 1
        self._used.add(encoder)
        await encoder.send(
            Encode(
                request_id=self._job.request_id,
                input_id=item.slot.input_id,
                attempt=item.attempt,
                kind=item.media.kind,
                content_hash=item.media.content_hash,
                media=item.media.data,
                destination=destination.instance_id,
                deadline_s=item.deadline_s,
                request_attempt=item.request_attempt,
            )
        )

    def _stays(self, item: _Item, encoder: Worker) -> bool:
        """Whether an item is left where it waits, and where something may have been made of it.

        It may leave for one with much less to do, once: what takes longer to compute than an encoder is given to answer
        would be begun over and over again otherwise.
        """
        able = self._able(item)
        if encoder not in able:
            return False
        least = min(map(outstanding_items, able))
        if item.has_left or outstanding_items(encoder) <= CROWDED * least + FREE_ITEMS:
            return True
        item.has_left = True
        return False

    def _choose(self, item: _Item) -> Worker | None:
        """Who encodes an item: the one that has the same content of this job already, another encoder, the destination
        itself; None where nobody can."""
        able = self._able(item)
        fresh = [worker for worker in able if worker.instance_id not in item.retries.failed_on] or able
        encoders = [worker for worker in fresh if worker is not item.destination]
        if not encoders:
            return next(iter(fresh), None)
        others = {other.encoder: other for other in self._items if other.encoder in encoders}
        content_hash = item.media.content_hash
        found = next((encoder for encoder, other in others.items() if other.media.content_hash == content_hash), None)
        taken = {worker.instance_id for worker in others if worker is not None}
        chosen, affinity = (found, "hit") if found else pick_encoder(content_hash, encoders, avoid=taken)
        self._cluster.metrics.encoder_affinity.labels(affinity).inc()
        return chosen

    def _able(self, item: _Item) -> list[Worker]:
        """Everybody who may encode an item."""
        own = item.destination
        encoders = self._cluster.pool.workers("encoder", matching=own)
        return [*encoders, own] if own is not None and own.record.encodes else encoders

    def _give_up(self, item: _Item) -> None:
        if item.encoder is not None:
            self._given_up.add((item.encoder, item.slot.input_id, item.attempt))
        self._release(item)

    def _succeeded(self, item: _Item) -> None:
        self._release(item)
        item.retries.succeeded()
        item.replaced = False

    def _release(self, item: _Item) -> None:
        if item.encoder is not None:
            item.encoder.load.items -= 1
            item.encoder = None
