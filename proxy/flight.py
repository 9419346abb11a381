"""The life of one job in the cluster: from the first message to a decoder until nothing of it is left anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from common.errors import TriptychError
from common.messages import Abort, Encoded, Failed, FromWorker, Generate, InputNeeded, Resumed, StopSequence, Tokens
from common.telemetry import get_logger
from proxy.items import ItemSender
from proxy.jobs import Job
from proxy.metrics import ProxyMetrics
from proxy.progress import Progress
from proxy.router import pick_decoder
from proxy.worker import Worker
from proxy.workers import WorkerPool

log = get_logger()

MAX_MOVES = 3
"""Decoders that one request may outlive."""


class Flight:
    """Runs one job. Messages come in by `post`, tokens go out by `batches`.

    A lost encoder costs a retry of its items; a lost decoder is replaced by another one, which continues each sequence
    after the tokens that were delivered. Leaving `batches` early, by any way, aborts the job on every worker that it
    touched.
    """

    def __init__(
        self, job: Job, pool: WorkerPool, metrics: ProxyMetrics, *, handoff_timeout_s: float, deadline_s: float
    ) -> None:
        self._job = job
        self._pool = pool
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._items = ItemSender(job, pool, metrics, handoff_timeout_s)
        self._events: asyncio.Queue[tuple[Worker, FromWorker | None]] = asyncio.Queue()
        self._moves = 0
        self._decoder: Worker | None = None
        self._progress = Progress(job.sampling)
        self._stopped: set[int] = set()

    def post(self, worker: Worker, message: FromWorker | None) -> None:
        """Hand over a worker's message; None says that the worker is gone."""
        self._events.put_nowait((worker, message))

    def uses(self, worker: Worker) -> bool:
        """Whether the job has something under way on that worker."""
        return worker is self._decoder or self._items.use(worker)

    async def batches(self) -> AsyncGenerator[Tokens]:
        """Run the job; yields its tokens as they come, each sequence's in order and without repeats.

        Raises TriptychError with what the client should be told: unavailable, timeout, or a worker's own error.
        """
        try:
            await self._start([])
            while not self._progress.done:
                for tokens in await self._handle(*await self._next_event()):
                    yield tokens
                await self._stop_what_is_enough()
        finally:
            await self._end()

    async def _start(self, resumed: list[Resumed]) -> None:
        """Give the job, or what is left of it, to a decoder, and its items to encoders."""
        job, decoder = self._job, self._take_decoder()
        await decoder.send(
            Generate(job.request_id, job.prompt_token_ids, job.slots, job.sampling, job.priority, resumed)
        )
        await self._items.send_all(decoder)

    def _take_decoder(self) -> Worker:
        decoder = pick_decoder(self._pool.workers("prefill_decode"))
        if decoder is None:
            raise TriptychError("unavailable", "no decoder is ready; try again shortly")
        decoder.load.requests += 1
        decoder.load.size += self._size
        self._decoder = decoder
        return decoder

    @property
    def _size(self) -> int:
        sampling = self._job.sampling
        return len(self._job.prompt_token_ids) + sampling.max_tokens * sampling.num_sequences

    async def _next_event(self) -> tuple[Worker, FromWorker | None]:
        """The next event; meanwhile the deadlines of the items and of the whole job are kept."""
        while True:
            if not self._events.empty():  # usual while tokens stream; a timer for each would cost more than the rest
                return self._events.get_nowait()
            now_s = time.time()
            if now_s >= self._deadline_s:
                raise TriptychError("timeout", "the request did not end within the server's request_timeout_s")
            wait_s = min(self._deadline_s, self._items.next_deadline_s) - now_s
            try:
                async with asyncio.timeout(max(wait_s, 0.0)):
                    return await self._events.get()
            except TimeoutError:
                assert self._decoder is not None
                await self._items.expire(time.time(), self._decoder)

    async def _handle(self, worker: Worker, message: FromWorker | None) -> list[Tokens]:
        decoder = self._decoder
        assert decoder is not None
        match message:
            case None if worker is decoder:
                return await self._continue_elsewhere()
            case None:
                await self._items.on_gone(worker, decoder)
            case Encoded(input_id=input_id, attempt=attempt, error=error):
                await self._items.on_encoded(worker, input_id, attempt, error, decoder)
            case _ if worker is not decoder:
                pass  # the last words of a decoder that has been replaced
            case InputNeeded(input_id=input_id):
                await self._items.on_needed(input_id, decoder)
            case Failed(error=error):
                self._forget_decoder()
                raise TriptychError(error.code, error.message, self._job.field_of(error.param))
            case Tokens():
                news = self._progress.accept(message)
                return [] if news is None else [news]
        return []

    async def _continue_elsewhere(self) -> list[Tokens]:
        """Go on with another decoder where the lost one stopped. Returns what is known to be complete without one."""
        lost = self._forget_decoder()
        self._moves += 1
        if self._moves > MAX_MOVES:  # or a request that no decoder survives would take them all down in turn
            raise TriptychError("unavailable", f"{self._moves} decoders were lost with this request; it is given up")
        complete = self._progress.close()
        if not self._progress.rest(self._job.enough):
            self._progress.done = True
            return complete
        log.warning("decoder lost, request moves", request=self._job.request_id, worker=lost.instance_id)
        self._metrics.retries.labels("decoder_gone").inc()
        await self._start(self._progress.resumed(self._job.enough))
        return complete

    async def _stop_what_is_enough(self) -> None:
        """Tell the decoder which sequences have ended here, while others go on."""
        enough = self._job.enough - self._stopped
        if not enough:
            return
        decoder, rest = self._decoder, self._progress.rest(frozenset())
        for index in enough.intersection(rest):
            self._stopped.add(index)
            if decoder is not None and not self._job.sampling.uses_beams:
                with contextlib.suppress(TriptychError):  # it is going: its loss is handled when it is known
                    await decoder.send(StopSequence(self._job.request_id, index))

    def _forget_decoder(self) -> Worker:
        decoder = self._decoder
        assert decoder is not None
        decoder.load.requests -= 1
        decoder.load.size -= self._size
        self._decoder = None
        return decoder

    async def _end(self) -> None:
        """Release what is counted; abort where the workers are not done. Does not wait for anything."""
        self._items.release_all()
        decoder = self._forget_decoder() if self._decoder is not None else None
        if self._progress.done:
            return
        self._metrics.aborts.inc()
        targets = self._items.abort_targets()
        if decoder is not None and not decoder.gone:
            targets.append((decoder, Abort(self._job.request_id)))
        for worker, abort in targets:
            try:
                await worker.send(abort)
            except TriptychError as error:  # it takes nothing: our silence will tell it
                log.warning("abort not sent", worker=worker.instance_id, error=error.info.message)
