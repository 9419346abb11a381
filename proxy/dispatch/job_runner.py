"""The life of one job in the cluster: from the first message to a worker until nothing of it is left anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Final

from common.errors import ErrorInfo, TriptychError
from common.messages import KV_INPUT_ID, Encoded, Failed, FromWorker, InputNeeded, Prefilled, Tokens
from common.telemetry import get_logger
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.jobs import Job, response_id
from proxy.dispatch.progress import Progress
from proxy.dispatch.prompt_logprobs import RemotePromptLogprobs
from proxy.dispatch.retries import BACKOFF_S
from proxy.dispatch.worker import Worker, WorkerEvent
from proxy.dispatch.worker_assignment import WorkerAssignment

MAX_UNREAD: Final = 4096
"""Messages of a job that may wait for whoever reads its tokens; with more, its client is not reading."""

Event = FromWorker | WorkerEvent
log = get_logger()


class JobRunner:
    """Runs one job. Messages come in by `post`, tokens go out by `tokens`.

    One worker generates the tokens. It computes the prompt, too, or another one does that for it. A lost encoder costs
    a retry of its items, a lost prefill worker another prefill; a lost decoder is replaced by another one, which
    continues each sequence after the tokens that were delivered. Who is missing altogether is waited for a while.
    Leaving `tokens` early, by any way, aborts the job on every worker that it touched.
    """

    def __init__(self, job: Job, cluster: DispatchContext, deadline_s: float) -> None:
        """`deadline_s` is by `time.monotonic`."""
        self._job = job
        self._cluster = cluster
        self._deadline_s = deadline_s
        self._progress = Progress(job.sampling)
        self._prompt_logprobs = RemotePromptLogprobs(job.sampling.prompt_logprobs is not None)
        self._crew = WorkerAssignment(job, cluster, self._progress, self._prompt_logprobs)
        self._events: asyncio.Queue[tuple[Worker, Event]] = asyncio.Queue()
        self._decoding: Worker | None = None  # whose tokens have come: it has the prompt, unless it asks for it
        self._stopped: set[int] = set()
        self._before_deadline: int | None = None  # events that had come when one was due, and are still to be read
        self._abandoned = False
        self._ended = False

    def post(self, worker: Worker, event: Event) -> bool:
        """Hand over what a worker says, or what has become of it. False where nobody reads: `abandon` is due."""
        if self._abandoned:
            return True
        self._events.put_nowait((worker, event))
        return self._events.qsize() <= MAX_UNREAD

    async def abandon(self) -> None:
        """Give the job up everywhere; who reads `tokens` after all is told."""
        log.warning("nobody reads the tokens, request ends", request=self._job.request_id, unread=MAX_UNREAD)
        self._abandoned = True
        self._cluster.metrics.unread_answers.inc()
        while not self._events.empty():
            self._events.get_nowait()
        await self._end()

    def uses(self, worker: Worker) -> bool:
        """Whether the job has something under way on that worker."""
        return worker in self._crew

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """Run the job; yields its tokens as they come, each sequence's in order and without repeats.

        Raises TriptychError with what the client should be told: unavailable, timeout, or a worker's own error.
        """
        cluster, request_id = self._cluster, self._job.request_id
        cluster.runners[request_id] = self
        cluster.metrics.flights.inc()
        try:
            await self._crew.place()
            while not self._progress.done:
                event = await self._next_event()
                for tokens in [] if event is None else await self._handle(*event):
                    if tokens.spans:
                        cluster.timelines.add(response_id(request_id), tokens.spans)
                    yield tokens
                for tokens in await self._follow_encoders():
                    yield tokens
                await self._stop_what_is_enough()
        finally:
            try:
                await self._end()
            finally:
                del cluster.runners[request_id]
                cluster.metrics.flights.dec()

    async def _next_event(self) -> tuple[Worker, Event] | None:
        """The next event; None where a deadline of the crew came first, and has been kept.

        Events that had come when it was due go first, for they may be what was waited for, and not have been read
        because the client was slow. Those that come later do not: a worker may never cease to send them.
        """
        if self._abandoned:
            message = f"more than {MAX_UNREAD} pieces of the answer were not read: it was ended"
            raise TriptychError("timeout", message)
        now_s, due_s = time.monotonic(), self._crew.next_deadline_s
        if now_s >= self._deadline_s:
            raise TriptychError("timeout", "the request did not end within the server's request_timeout_s")
        if now_s < due_s:
            self._before_deadline = None
        elif not self._reads_before_deadline():
            await self._crew.expire(now_s)
            return None
        if not self._events.empty():  # usual while tokens stream; a timer for each would cost more than the rest
            return self._events.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._deadline_s, due_s) - now_s):
                return await self._events.get()
        return None

    def _reads_before_deadline(self) -> bool:
        """A deadline is due: whether there still is an event that had come by then, which is read now."""
        left = self._events.qsize() if self._before_deadline is None else self._before_deadline
        self._before_deadline = left - 1 if left else None
        return left > 0

    async def _handle(self, worker: Worker, event: Event) -> list[Tokens]:
        crew = self._crew
        match event:
            case Tokens():
                return self._on_tokens(worker, event)
            case Prefilled():
                return await self._on_prefilled(worker, event)
            case WorkerEvent.GONE:
                return await self._on_gone(worker)
            case WorkerEvent.JOINED:
                await crew.on_joined()
            case Encoded():
                await crew.items.on_encoded(worker, event)
            case InputNeeded():
                await self._on_needed(worker, event)
            case Failed():
                return await self._on_failed(worker, event)
        return []

    def _on_tokens(self, worker: Worker, message: Tokens) -> list[Tokens]:
        if not self._crew.decodes(worker, message.attempt):
            return []  # the last words of one that has been replaced, perhaps by itself
        self._decoding = worker
        if self._crew.prefill.worker is None:
            self._crew.items.read(worker)  # whatever its encoders are still to say: tokens need all inputs
        return self._news(self._prompt_logprobs.tokens(message))

    def _news(self, messages: list[Tokens]) -> list[Tokens]:
        return [news for message in messages if (news := self._progress.accept(message)) is not None]

    async def _on_needed(self, worker: Worker, message: InputNeeded) -> None:
        crew, decodes = self._crew, self._crew.decodes(worker, message.request_attempt)
        if message.input_id == KV_INPUT_ID:
            if decodes:
                self._decoding = None
                await crew.prefill.on_needed(message.attempt)
        elif decodes or crew.prefills(worker, message.request_attempt):
            await crew.items.on_needed(worker, message)

    async def _on_prefilled(self, worker: Worker, message: Prefilled) -> list[Tokens]:
        prefill = self._crew.prefill
        if not self._crew.prefills(worker, message.attempt):
            return []  # about an attempt that has been given up
        if message.error is not None:
            await self._on_prefill_lost(message.error, "prefill_error")
            return []
        prefill.finish()
        return self._news(self._prompt_logprobs.prefilled(message.prompt_logprobs))

    async def _on_failed(self, worker: Worker, message: Failed) -> list[Tokens]:
        error = message.error
        if self._crew.prefills(worker, message.attempt):
            await self._on_prefill_lost(error, "prefill_error")
        elif self._crew.decodes(worker, message.attempt):
            if error.code == "unavailable":  # such as: it had lost us, and has dropped everything of ours
                return await self._move("decoder_error", pause_s=BACKOFF_S)
            await self._crew.leave(decoder_has_it=False)
            raise TriptychError(error.code, error.message, self._job.field_of(error.param))
        elif worker not in (self._crew.decoder, self._crew.prefill.worker):
            await self._crew.items.on_failed(worker, error)
        return []

    async def _on_gone(self, worker: Worker) -> list[Tokens]:
        if worker is self._crew.decoder:
            return await self._move("decoder_gone")
        if worker is self._crew.prefill.worker:
            error = ErrorInfo("unavailable", f"{worker.instance_id} is gone")
            await self._on_prefill_lost(error, "prefill_gone")
        await self._crew.items.on_gone(worker)
        return []

    async def _follow_encoders(self) -> list[Tokens]:
        """Go where the inputs can be encoded, where they cannot be any more for who reads them."""
        if self._progress.done or not self._crew.stranded:
            return []
        return await self._move("no_encoder", decoder_has_it=True)

    async def _move(self, reason: str, *, pause_s: float = 0.0, decoder_has_it: bool = False) -> list[Tokens]:
        """Go on elsewhere. Returns what turns out to be complete without."""
        self._decoding = None  # it may come back to the same worker, without its prompt
        complete = self._progress.close(self._job.enough)
        await self._crew.move(reason, pause_s=pause_s, decoder_has_it=decoder_has_it)
        return complete

    async def _on_prefill_lost(self, error: ErrorInfo, reason: str) -> None:
        """Its decoder may have all it needs, or wait for another prefill; sometimes both have to begin again."""
        crew = self._crew
        begun = crew.decoder is not None and self._decoding is crew.decoder
        final = not error.retryable and error.code != "internal_error"
        if begun and not self._prompt_logprobs.withheld:
            crew.prefill.finish()
        elif (self._prompt_logprobs.withheld and not final) or (error.retryable and crew.pairless()):
            self._decoding = None
            await crew.move(reason, decoder_has_it=True)
        else:
            await crew.prefill.fail(error, reason)

    async def _stop_what_is_enough(self) -> None:
        """Tell the decoder which sequences have ended here, while others go on."""
        enough = self._job.enough - self._stopped
        for index in enough.intersection(self._progress.rest(frozenset())) if enough else ():
            self._stopped.add(index)
            await self._crew.stop_sequence(index)

    async def _end(self) -> None:
        """Release what is counted; abort where the workers are not done."""
        if self._ended:
            return
        self._ended = True
        if self._progress.done:
            await self._crew.finish()
        else:
            self._cluster.metrics.aborts.inc()
            await self._crew.abort()
