"""Dispatch of one job's prompt to a prefill worker apart from the decoder, again after failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.errors import ErrorInfo, TriptychError
from common.messages import Abort, Resumed
from common.telemetry import get_logger
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.encode_dispatcher import EncodeDispatcher
from proxy.dispatch.jobs import Job
from proxy.dispatch.progress import Deadlines, Retries
from proxy.dispatch.worker import Worker

log = get_logger()


@dataclass(eq=False, repr=False)
class PrefillDispatcher:
    """Runs the prefills of one job, each for one attempt of a decoder, from `start` to `stop`.

    A newer attempt replaces older attempts on any worker. `attempt` is the number of the last one; decoders share the
    count. The inputs go along. Without a worker, or after failures of all workers, the prefill waits.
    """

    _job: Job
    _cache_keys: list[bytes]
    _context: DispatchContext
    _encode: EncodeDispatcher
    _attempts: Iterator[int]
    """Numbers of coming attempts."""
    _deadlines: Deadlines
    _retries: Retries = field(default_factory=lambda: Retries("the prompt could not be computed"))
    """Counted for all decoders of the job."""
    _decoder: Worker | None = None
    """The decoder that gets the prompt from elsewhere, if one does."""
    _decoder_attempt: int = 0
    _resumed: list[Resumed] = field(default_factory=list)
    _sent_s: float = 0.0  # to `worker`
    _replaced: bool = False  # by a newer attempt, so that one attempt may run for nothing
    attempt: int = 0
    worker: Worker | None = None
    """The worker that computes the prompt, while it does."""

    def start(self, worker: Worker, decoder: Worker, attempt: int, resumed: list[Resumed]) -> None:
        """Send the prompt to a worker, for the `attempt` of a decoder. Raises as EncodeDispatcher does."""
        self._decoder, self._decoder_attempt, self._resumed = decoder, attempt, resumed
        self.attempt, self._replaced = attempt, False
        self._send(worker, decoder)

    def _send(self, worker: Worker, decoder: Worker) -> None:
        job = self._job
        self._deadlines.clear(self)
        self._sent_s = time.monotonic()
        self.worker = worker
        worker.load.requests += 1
        worker.load.tokens += len(job.prompt_token_ids)
        log.debug("prompt sent", request=job.request_id, prefill=worker.instance_id, attempt=self.attempt)
        worker.send(
            job.message(
                self._resumed,
                prefill_for=decoder.instance_id,
                attempt=self.attempt,
                prefill_for_attempt=self._decoder_attempt,
            )
        )
        self._encode.send_all(worker, self.attempt)

    def runs_on(self, worker: Worker, attempt: int) -> bool:
        """Whether this worker computes the prompt, in this attempt."""
        return worker is self.worker and attempt == self.attempt

    def finish(self) -> None:
        """Release the worker after a delivered prompt."""
        if self.worker is not None:
            self._encode.read(self.worker)
        self._release()
        self._retries.succeeded()
        self._replaced = False

    def stop(self, *, abort: bool = True) -> None:
        """Stop until the next `start`; `abort` the worker always, or only a superfluous repeat."""
        worker, self._decoder = self.worker, None
        self._deadlines.clear(self)
        if worker is not None:
            self._release()
            if abort or self._replaced:
                worker.notify(Abort(self._job.request_id))

    def fail(self, error: ErrorInfo, reason: str) -> None:
        """Try again after the worker failed or is gone. Raises `error` where another attempt cannot do better."""
        worker = self.worker
        assert worker is not None
        self._release()
        if error.code == "timeout":
            self._count_wait(error, worker)
        elif error.retryable or error.code == "internal_error":
            self._retries.failed(worker.instance_id, error)
        else:
            raise self._job.error_of(error)
        self._again(reason)

    def on_needed(self, attempt: int) -> None:
        """Try again: the decoder did not get the prompt of `attempt` in time. Raises after too many times."""
        if self._decoder is None or self in self._deadlines or attempt < self.attempt:
            return
        worker = self.worker
        if worker is not None:
            late = ErrorInfo("timeout", f"{worker.instance_id} did not deliver the prompt in time")
            self._count_wait(late, worker)
            self._release()
            worker.notify(Abort(self._job.request_id))
        self._again("prompt_needed")

    def _count_wait(self, error: ErrorInfo, worker: Worker) -> None:
        in_full = self._context.is_full_wait(self._sent_s)
        self._retries.waited(error, in_full=in_full, undelivered_by=worker.instance_id)

    def _again(self, reason: str) -> None:
        self._context.count_retry(self._job.request_id, reason)
        self._encode.recall()
        self._replaced = True
        retries = self._retries
        candidates = {worker.instance_id for worker in self._context.pool.workers("prefill", matching=self._decoder)}
        if retries.failures and candidates and candidates <= retries.failed_on:
            self._deadlines.set(self, time.monotonic() + retries.backoff_s, self._place, early=True)
        else:
            self._place()

    def _place(self) -> None:
        context, decoder = self._context, self._decoder
        assert decoder is not None
        worker = context.placer.choose_prefiller(
            context.pool, self._cache_keys, decoder, self._retries.failed_on, media=bool(self._job.media)
        )
        if worker is None:
            left_s = context.handoff_timeout_s - context.pool.absent_s("prefill", matching=decoder)
            if left_s <= 0:
                raise TriptychError("unavailable", "no prefill worker is ready; try again shortly")
            self._deadlines.set(self, time.monotonic() + left_s, self._place, early=True)
            return
        self.attempt = next(self._attempts)
        self._send(worker, decoder)

    def _release(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.load.requests -= 1
            worker.load.tokens -= len(self._job.prompt_token_ids)
