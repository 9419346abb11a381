"""Dispatch of one job's media items to encoders, and again after failures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.errors import ErrorInfo, TriptychError
from common.messages import Abort, Encode, Encoded, InputNeeded, InputSlot
from common.telemetry import get_logger
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.jobs import Job, MediaItem
from proxy.dispatch.placement import FREE_ITEMS, any_encodes, outstanding, pick_encoder
from proxy.dispatch.progress import Deadlines, Retries
from proxy.dispatch.worker import Worker

CROWDED: Final = 2
"""A waiting item leaves an encoder with this many times the items of another encoder, and FREE_ITEMS more."""

log = get_logger()


@dataclass(eq=False)
class _Item:
    """A media item: at `encoder`, waiting to be sent (a deadline and no encoder), or in place."""

    slot: InputSlot
    media: MediaItem
    retries: Retries
    attempt: int = -1
    destination: Worker | None = None
    request_attempt: int = 0  # of the job, at the destination
    encoder: Worker | None = None
    sent_s: float = 0.0  # to the encoder
    replaced: bool = False  # sent again after a failure, though the failed attempt may have arrived
    has_left: bool = False  # an encoder with too much to do


class EncodeDispatcher:
    """Sends the items of one job to encoders, and repeats after failures. All methods run on one loop.

    Each failure, a long silence included, counts against its item; after too many the job fails with the last error. An
    encoder that reports an unfinished item in time is asked again for as long as the job lasts. The last resort is the
    destination itself, if able to encode; otherwise an item waits for the return of a recent encoder.
    """

    def __init__(self, job: Job, context: DispatchContext, deadlines: Deadlines) -> None:
        self._job = job
        self._context = context
        self._deadlines = deadlines
        self._items = {
            slot.input_id: _Item(slot, media, Retries(f"{media.param} could not be encoded", media.param))
            for slot, media in zip(job.slots, job.media, strict=True)
        }
        self.pending: set[_Item] = set()
        """Items that are at an encoder or wait for one."""
        self.used: set[Worker] = set()
        """Encoders that have received an item."""
        self._unanswered: set[tuple[Worker, int, int]] = set()  # replaced attempts that may still run

    def send_all(self, destination: Worker, request_attempt: int) -> None:
        """Send every item to `destination`, for the job's attempt `request_attempt`.

        Several encoders share the items; equal content goes to one. Raises TriptychError("unavailable") without any.
        """
        if self.pending:
            self.recall()
        for item in self._items.values():
            item.destination, item.request_attempt = destination, request_attempt
            self._place(item)

    def recall(self) -> None:
        """Stop waiting for all items until the next `send_all`."""
        for item in list(self.pending):
            self._release(item, answered=False)

    def read(self, reader: Worker) -> None:
        """Note that `reader` has read all items, whatever the encoders still report."""
        for item in list(self.pending):
            if item.destination is reader:  # a replaced item may have been read from an earlier attempt
                self._succeeded(item, answered=not item.replaced)

    def finish(self) -> None:
        """Release all items of an answered job, and stop replaced attempts. A late last reply is harmless."""
        for worker in {worker for worker, _, _ in self._unanswered}:
            worker.notify(Abort(self._job.request_id))
        for item in list(self.pending):
            self._release(item)

    def on_encoded(self, worker: Worker, reply: Encoded) -> None:
        """Handle an encoder's reply. Raises the error where another encoder cannot do better."""
        self._unanswered.discard((worker, reply.input_id, reply.attempt))
        item, error = self._items.get(reply.input_id), reply.error
        if item is None or item.encoder is not worker or item.attempt != reply.attempt:
            return  # about a replaced attempt
        if error is None:
            self._succeeded(item)
            return
        self._release(item)
        if error.code == "timeout":
            item.replaced = True
            reason = "undelivered" if reply.undelivered else "encoder_busy"
            self._wait_again(item, worker, error, reason, undelivered=reply.undelivered)
        elif error.retryable or error.code == "internal_error":
            self._retry(item, worker, error, "encoder_error")
        else:
            raise TriptychError(error.code, error.message, item.media.param)

    def on_needed(self, destination: Worker, message: InputNeeded) -> None:
        """Send an input on demand of `destination`, perhaps again. Raises after too many failures in a row."""
        request_attempt = message.request_attempt
        item = self._items.get(message.input_id)
        if item is None:
            return
        encoder = item.encoder
        if (item.destination, item.request_attempt) != (destination, request_attempt):  # sent to another worker
            self._release(item, answered=False)
            item.destination, item.request_attempt = destination, request_attempt
            self._again(item, "input_needed")
        elif encoder is not None and message.attempt < item.attempt:
            return  # the destination does not know yet of the attempt under way
        elif encoder is not None:
            late = ErrorInfo("timeout", f"{encoder.instance_id} did not deliver in time", item.media.param)
            self._release(item, answered=False)
            self._wait_again(item, encoder, late, "input_needed")
        elif item not in self.pending:  # in place before, and evicted: no failure
            self._again(item, "input_needed")

    def on_lost(self, worker: Worker, error: ErrorInfo, reason: str, *, answered: bool) -> None:
        """Resend the items of an encoder that is gone, or has lost the job. Raises without encoders.

        The last attempts are over (`answered`), or may still run for nothing.
        """
        for item in self._items.values():
            if item.encoder is worker:
                self._release(item, answered=answered)
                self._retry(item, worker, error, reason)

    @property
    def stranded(self) -> bool:
        """Whether an item waits without any able encoder."""
        return any(item.encoder is None and not self._able(item) for item in self.pending)

    def uses(self, worker: Worker) -> bool:
        """Whether an item is under way on an encoder."""
        return any(item.encoder is worker for item in self.pending)

    def _on_silent(self, item: _Item) -> None:
        worker = item.encoder
        assert worker is not None
        limit = f"{worker.instance_id} did not answer within {self._context.handoff_timeout_s:g} s"
        self._release(item, answered=False)
        self._retry(item, worker, ErrorInfo("timeout", limit, item.media.param), "silent")

    def _retry(self, item: _Item, worker: Worker, error: ErrorInfo, reason: str) -> None:
        item.retries.failed(worker.instance_id, error)
        item.replaced = True
        able = self._able(item)
        if able and all(other.instance_id in item.retries.failed_on for other in able):
            self._context.count_retry(self._job.request_id, reason)
            self._wait(item, time.monotonic() + item.retries.backoff_s)
        else:
            self._again(item, reason)

    def _wait_again(
        self, item: _Item, worker: Worker, error: ErrorInfo, reason: str, *, undelivered: bool = False
    ) -> None:
        in_full = self._context.is_full_wait(item.sent_s)  # the item waits for memory or compute that others use
        ends_early = not in_full and item.retries.waits > 0  # again: another encoder may be better
        undelivered_by = worker.instance_id if undelivered or ends_early else None
        item.retries.waited(error, in_full=in_full, undelivered_by=undelivered_by)
        self._again(item, reason, at=worker if in_full and not undelivered else None)

    def _again(self, item: _Item, reason: str, at: Worker | None = None) -> None:
        self._context.count_retry(self._job.request_id, reason)
        self._place(item, at)

    def _place(self, item: _Item, at: Worker | None = None) -> None:
        """Send an item to an encoder, preferably to `at`, or wait for an encoder."""
        context, destination = self._context, item.destination
        assert destination is not None
        if destination.gone:
            return  # the job hears of it next, and needs the item elsewhere
        encoder = at if at is not None and self._stays(item, at) else self._choose(item)
        now_s = time.monotonic()
        if encoder is None:
            left_s = context.handoff_timeout_s - context.pool.absent_s("encoder", matching=destination)
            if left_s <= 0 and not any_encodes(context.pool):
                raise TriptychError("unavailable", "no encoder is ready; try again shortly", item.media.param)
            self._wait(item, now_s + max(0.0, left_s))  # stranded: the job may move to where it can be encoded
            return
        if encoder is destination and encoder.record.role != "encode_prefill_decode":
            context.metrics.encoder_fallbacks.inc()
        deadline_s = now_s + context.handoff_timeout_s
        item.attempt += 1
        item.encoder, item.sent_s = encoder, now_s
        self.pending.add(item)
        # Silence counts from the encoder's own deadline: large media may be long on their way.
        self._deadlines.set(item, deadline_s + context.handoff_timeout_s, partial(self._on_silent, item))
        encoder.load.items += 1
        self.used.add(encoder)
        log.debug("item sent", request=self._job.request_id, item=item.slot.input_id, encoder=encoder.instance_id)
        encoder.send(
            Encode(
                request_id=self._job.request_id,
                input_id=item.slot.input_id,
                attempt=item.attempt,
                kind=item.media.kind,
                content_hash=item.media.content_hash,
                media=item.media.data,
                destination=destination.instance_id,
                deadline_s=deadline_s,
                request_attempt=item.request_attempt,
            )
        )

    def _wait(self, item: _Item, until_s: float) -> None:
        """Place the item again at `until_s`, or earlier when a worker joins."""
        self.pending.add(item)
        self._deadlines.set(item, until_s, partial(self._place, item), early=True)

    def _stays(self, item: _Item, encoder: Worker) -> bool:
        """Whether a waiting item stays with an encoder, perhaps partly done.

        An item may move once, to an encoder with much less to do. With more moves, an item that takes longer than the
        deadline of an encoder would begin again and again.
        """
        able = self._able(item)
        if encoder not in able:
            return False
        least = min(outstanding(other).items for other in able)
        if item.has_left or outstanding(encoder).items <= CROWDED * least + FREE_ITEMS:
            return True
        item.has_left = True
        return False

    def _choose(self, item: _Item) -> Worker | None:
        """Return the encoder with the same content of this job, another encoder, or last the destination itself.

        None where no worker can encode.
        """
        able = self._able(item)
        fresh = [worker for worker in able if worker.instance_id not in item.retries.failed_on] or able
        encoders = [worker for worker in fresh if worker is not item.destination]
        if not encoders:
            return next(iter(fresh), None)
        content_hash = item.media.content_hash
        others = [(one.encoder, one.media.content_hash) for one in self._items.values() if one.encoder in encoders]
        found = next((encoder for encoder, content in others if content == content_hash), None)
        taken = {encoder.instance_id for encoder, _ in others if encoder is not None}
        chosen, affinity = (found, "hit") if found else pick_encoder(content_hash, encoders, avoid=taken)
        self._context.metrics.encoder_affinity.labels(affinity).inc()
        return chosen

    def _able(self, item: _Item) -> list[Worker]:
        """Return all workers that may encode an item."""
        own = item.destination
        encoders = self._context.pool.workers("encoder", matching=own)
        return [*encoders, own] if own is not None and own.record.encodes else encoders

    def _succeeded(self, item: _Item, *, answered: bool = True) -> None:
        self._release(item, answered=answered)
        item.retries.succeeded()
        item.replaced = False

    def _release(self, item: _Item, *, answered: bool = True) -> None:
        """Release an item's encoder. The last attempt was `answered`, or may still run for nothing."""
        self.pending.discard(item)
        self._deadlines.clear(item)
        if item.encoder is None:
            return
        if not answered:
            self._unanswered.add((item.encoder, item.slot.input_id, item.attempt))
        item.encoder.load.items -= 1
        item.encoder = None
