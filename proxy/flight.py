"""The life of one job in the cluster: from the first message to a decoder until nothing of it is left anywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from common.errors import TriptychError
from common.messages import Abort, Encoded, Failed, FinishReason, FromWorker, Generate, InputNeeded, Span, Tokens
from common.telemetry import get_logger
from proxy.items import ItemSender
from proxy.jobs import Job
from proxy.metrics import ProxyMetrics
from proxy.router import pick_decoder
from proxy.worker import Worker
from proxy.workers import WorkerPool

log = get_logger()


@dataclass(frozen=True)
class TokenBatch:
    """The next tokens of a job, in order and without repeats; `finish_reason` on the last one."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    spans: list[Span] = field(default_factory=list)


class Flight:
    """Runs one job. Messages come in by `post`, tokens go out by `batches`.

    A lost encoder costs a retry of its items; a lost decoder is replaced by another one, which continues after the
    tokens that were delivered. Leaving `batches` early, by any way, aborts the job on every worker it touched.
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
        self._decoder: Worker | None = None
        self._delivered: list[int] = []
        self._run_offset = 0  # tokens delivered before the current decoder took over
        self._finished = False

    def post(self, worker: Worker, message: FromWorker | None) -> None:
        """Hand over a worker's message; None says that the worker is gone."""
        self._events.put_nowait((worker, message))

    def uses(self, worker: Worker) -> bool:
        """Whether the job has something under way on that worker."""
        return worker is self._decoder or self._items.use(worker)

    async def batches(self) -> AsyncGenerator[TokenBatch]:
        """Run the job; yields its tokens as they come.

        Raises TriptychError with what the client should be told: unavailable, timeout, or a worker's own error.
        """
        try:
            await self._begin()
            while not self._finished:
                batch = await self._handle(*await self._next_event())
                if batch is not None:
                    yield batch
        finally:
            await self._end()

    async def _begin(self) -> None:
        decoder = self._take_decoder()
        await decoder.send(
            Generate(self._job.request_id, self._job.prompt_token_ids, self._job.slots, self._job.sampling)
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
        return len(self._job.prompt_token_ids) + self._job.sampling.max_tokens

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

    async def _handle(self, worker: Worker, message: FromWorker | None) -> TokenBatch | None:
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
                raise TriptychError(error.code, error.message, error.param)
            case Tokens():
                return self._accept(message)
        return None

    def _accept(self, message: Tokens) -> TokenBatch | None:
        """The news in a message: repeats are dropped, a gap is an error."""
        have = len(self._delivered) - self._run_offset
        if message.offset > have:
            raise TriptychError("internal_error", f"tokens {have} to {message.offset} were lost on the way")
        fresh = message.token_ids[have - message.offset :]
        self._delivered += fresh
        if message.finish_reason is not None:
            self._finished = True
        elif not fresh:
            return None
        prompt_tokens = max(0, message.num_prompt_tokens - self._run_offset)
        return TokenBatch(fresh, message.finish_reason, prompt_tokens, message.spans)

    async def _continue_elsewhere(self) -> TokenBatch | None:
        """Go on with another decoder where the lost one stopped."""
        lost = self._forget_decoder()
        if len(self._delivered) >= self._job.sampling.max_tokens:  # only its last word was missing
            self._finished = True
            return TokenBatch([], "length", 0)
        log.warning("decoder lost, request moves", request=self._job.request_id, worker=lost.instance_id)
        self._metrics.retries.labels("decoder_gone").inc()
        rest = self._job.after(self._delivered)
        decoder = self._take_decoder()
        self._run_offset = len(self._delivered)
        await decoder.send(Generate(rest.request_id, rest.prompt_token_ids, rest.slots, rest.sampling))
        await self._items.restart(decoder)
        return None

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
        if self._finished:
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
