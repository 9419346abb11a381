"""The prompt of one job, computed apart from where it is decoded: by whom, and by whom after a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from common.errors import ErrorInfo, TriptychError
from common.messages import Abort, Generate, Inquiry, Resumed
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.encode_dispatcher import EncodeDispatcher
from proxy.dispatch.jobs import Job
from proxy.dispatch.placement import Placement
from proxy.dispatch.retries import Retries
from proxy.dispatch.worker import Claim, Worker


class PrefillDispatcher:
    """Runs the prefill of one job for a decoder that stays the same until the next `start`.

    A newer attempt replaces older ones, wherever they run; `attempt` is the last one's number, out of the same count as
    those of the decoders. The inputs go along.
    Where nobody can do it at the moment, or everybody has just failed, it waits by `expire`, to be called at `due_s`.
    """

    def __init__(
        self,
        job: Job,
        cache_keys: list[bytes],
        cluster: DispatchContext,
        items: EncodeDispatcher,
        attempts: Iterator[int],
    ) -> None:
        """`attempts` are the numbers of what is still to come."""
        self._job = job
        self._attempts = attempts
        self._cache_keys = cache_keys
        self._cluster = cluster
        self._items = items
        self._retries = Retries("the prompt could not be computed")
        self._decoder: Worker | None = None
        self._decoder_attempt = 0
        self._resumed: list[Resumed] = []
        self._claim: Claim | None = None
        self._sent_s = 0.0  # to who is at it
        self._replaced = False  # by a newer attempt, so that one may run for nothing
        self.attempt = 0
        self.due_s = math.inf

    @property
    def worker(self) -> Worker | None:
        """Who is at it."""
        return None if self._claim is None else self._claim.worker

    async def start(self, placement: Placement, resumed: list[Resumed], attempt: int) -> None:
        """Begin for a new decoder, which knows of this attempt already. Raises as EncodeDispatcher does."""
        assert placement.prefiller is not None
        self._decoder, self._decoder_attempt, self._resumed = placement.decoder, attempt, resumed
        self._replaced, self.attempt = False, attempt
        await self._send(placement.prefiller)

    def finish(self) -> None:
        """The prompt is where it is needed, and its inputs have been read."""
        if self.worker is not None:
            self._items.read(self.worker)
        self._release()
        self._retries.succeeded()
        self._replaced = False

    async def stop(self) -> None:
        """It is not needed any more; the next decoder starts it again."""
        worker, self._decoder, self.due_s = self.worker, None, math.inf
        self._release()
        await self._abort(worker)

    async def fail(self, error: ErrorInfo, reason: str) -> None:
        """What is at it has failed, or is gone. Raises `error` where another attempt cannot do better."""
        worker = self.worker
        assert worker is not None
        self._release()
        if error.code == "timeout":
            self._note_wait(error, worker)
        elif error.retryable or error.code == "internal_error":
            self._retries.failed(worker.instance_id, error)
        else:
            raise TriptychError(error.code, error.message, self._job.field_of(error.param))
        await self._again(reason)

    async def on_needed(self, attempt: int) -> None:
        """The decoder says that what `attempt` computed did not come in time. Raises after too many times."""
        if self._decoder is None or self.due_s < math.inf or attempt < self.attempt:
            return
        worker = self.worker
        if worker is not None:
            late = ErrorInfo("timeout", f"{worker.instance_id} did not deliver the prompt in time")
            self._note_wait(late, worker)
            self._release()
            await self._abort(worker)
        await self._again("prompt_needed")

    async def expire(self, now_s: float) -> None:
        """Begin what is due."""
        if self.due_s <= now_s:
            await self._place()

    async def inquire(self) -> None:
        """Ask who is at it whether it still is; one that is not fails, as far as we are told."""
        if self.worker is not None:
            await self.worker.tell(Inquiry(self._job.request_id, self.attempt))

    async def on_joined(self) -> None:
        """There is a new worker: it may be the one that is waited for."""
        if self.due_s < math.inf:
            await self._place()

    async def finish_superfluous(self) -> None:
        """The job has been answered. A repeated attempt may still run for nothing: it stops."""
        worker = self.worker if self._replaced else None
        self._release()
        await self._abort(worker)

    def _note_wait(self, error: ErrorInfo, worker: Worker) -> None:
        in_full = self._cluster.is_full_wait(self._sent_s)
        self._retries.waited(error, in_full=in_full, undelivered_by=worker.instance_id)

    async def _again(self, reason: str) -> None:
        self._cluster.metrics.retries.labels(reason).inc()
        self._items.recall()
        self._replaced = True
        retries = self._retries
        candidates = {worker.instance_id for worker in self._cluster.pool.workers("prefill", matching=self._decoder)}
        if retries.failures and candidates and candidates <= retries.failed_on:
            self.due_s = time.monotonic() + retries.backoff_s
        else:
            await self._place()

    async def _place(self) -> None:
        cluster, decoder = self._cluster, self._decoder
        assert decoder is not None
        worker = cluster.placer.choose_prefiller(
            cluster.pool, self._cache_keys, decoder, self._retries.failed_on, media=bool(self._job.media)
        )
        if worker is None:
            left_s = cluster.patience_s(cluster.pool.absent_s("prefill", matching=decoder))
            if left_s <= 0:
                raise TriptychError("unavailable", "no prefill worker is ready; try again shortly")
            self.due_s = time.monotonic() + left_s
            return
        self.attempt = next(self._attempts)
        await self._send(worker)

    async def _send(self, worker: Worker) -> None:
        job, decoder = self._job, self._decoder
        assert decoder is not None
        self.due_s, self._sent_s = math.inf, time.monotonic()
        self._claim = Claim(worker, len(job.prompt_token_ids))
        await worker.send(
            Generate(
                job.request_id,
                job.prompt_token_ids,
                job.slots,
                job.sampling,
                job.priority,
                self._resumed,
                prefill_for=decoder.instance_id,
                attempt=self.attempt,
                prefill_for_attempt=self._decoder_attempt,
            )
        )
        await self._items.send_all(worker, self.attempt)

    async def _abort(self, worker: Worker | None) -> None:
        if worker is not None:
            await worker.tell(Abort(self._job.request_id))

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
