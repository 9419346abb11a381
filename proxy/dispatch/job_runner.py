"""The life of one job in the cluster, from the first message until all workers are released."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from common.errors import ErrorInfo, TriptychError
from common.messages import (
    KV_INPUT_ID,
    Abort,
    Encoded,
    Failed,
    FromWorker,
    InputNeeded,
    Inquiry,
    Prefilled,
    StopSequence,
    Tokens,
)
from common.telemetry import get_logger
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.encode_dispatcher import EncodeDispatcher
from proxy.dispatch.jobs import Job, cache_keys
from proxy.dispatch.placement import WHOLE, any_encodes
from proxy.dispatch.prefill_dispatcher import PrefillDispatcher
from proxy.dispatch.progress import BACKOFF_S, Action, Deadlines, Progress, joined
from proxy.dispatch.worker import Worker, WorkerEvent

MAX_UNREAD: Final = 8192
"""Limit of unread messages of a job, beyond which the client does not read. A burst of a worker (BURST_S) is less."""
MAX_MOVES: Final = 3
"""Decoders that one request may outlive."""
INQUIRY_S: Final = 5.0
"""Pause between two inquiries to the workers of a job whether they still have it."""

Event = FromWorker | WorkerEvent
log = get_logger()


class JobRunner:
    """Runs one job. Messages come in by `post`, tokens go out by `tokens`.

    The decoder generates the tokens; the prompt is computed there or on a prefill worker. A lost encoder costs a retry
    of its items, a lost prefill worker another prefill. After the loss of a decoder, another decoder continues each
    sequence after the delivered tokens. Missing workers are waited for. Events that came before a deadline are handled
    before the deadline. Any early end of `tokens` aborts the job on all of its workers.
    """

    def __init__(self, job: Job, context: DispatchContext, deadline_s: float, runners: dict[str, JobRunner]) -> None:
        """`deadline_s` is by `time.monotonic`. The job is in `runners`, by its request id, while `tokens` runs."""
        self._job = job
        self._runners = runners
        self._context = context
        self._deadline_s = deadline_s
        self._events: deque[tuple[Worker, Event] | Action] = deque()  # an action: a deadline is due
        self._arrived = asyncio.Event()
        self._news: list[Tokens] = []
        self._progress = Progress(job.sampling)
        self._cache_keys = cache_keys(job)
        self._attempts = itertools.count(1)
        self._deadlines = Deadlines(self._wake)
        self._encode = EncodeDispatcher(job, context, self._deadlines)
        self._prefill = PrefillDispatcher(job, self._cache_keys, context, self._encode, self._attempts, self._deadlines)
        self._decoder: Worker | None = None
        sampling = job.sampling
        self._num_tokens = len(job.prompt_token_ids) + sampling.max_tokens * sampling.num_sequences  # at most
        self._attempt = 0  # of the decoder
        self._begun = False  # the decoder has sent tokens, and has the prompt unless the prompt is needed again
        self._moves = 0
        self._stopped: set[int] = set()
        self._ended = False

    def post(self, worker: Worker, event: Event) -> None:
        """Add a message or an event of a worker. With too many unread the job ends; a later reader gets an error."""
        if self._ended:
            return
        self._events.append((worker, event))
        self._arrived.set()
        if len(self._events) > MAX_UNREAD:
            self._abandon()

    def _wake(self, action: Action) -> None:
        self._events.append(action)
        self._arrived.set()

    def _abandon(self) -> None:
        log.warning("nobody reads the tokens, request ends", request=self._job.request_id, unread=MAX_UNREAD)
        self._context.metrics.unread_answers.inc()
        self._events.clear()
        self._end()

    def uses(self, worker: Worker) -> bool:
        """Whether that worker runs any part of the job."""
        return worker in (self._decoder, self._prefill.worker) or self._encode.uses(worker)

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """Run the job and yield the tokens as they come, each sequence in order and without repeats.

        Raises TriptychError for the client: unavailable, timeout, or a worker's own error.
        """
        context, request_id = self._context, self._job.request_id
        self._runners[request_id] = self
        context.metrics.running_jobs.inc()
        try:
            self._deadlines.set("request", self._deadline_s, self._time_out)
            self._place()
            while not self._progress.done:
                if self._encode.pending and self._encode.stranded and any_encodes(context.pool):
                    self._move("no_encoder", abort=True)  # to where the inputs can be encoded
                else:
                    await self._step()
                    self._take_waiting_tokens()
                news, self._news = self._news, []
                for tokens in joined(news) if len(news) > 1 else news:
                    if tokens.spans:
                        context.timelines.add(request_id, tokens.spans)
                    yield tokens
                if self._job.enough:
                    self._stop_sequences()
        except TriptychError as error:
            if error.info.code == "overloaded":
                context.metrics.refused.labels("worker").inc()
            raise
        finally:
            del self._runners[request_id]
            context.metrics.running_jobs.dec()
            self._end()

    async def _step(self) -> None:
        """Handle the next event or due deadline."""
        if time.monotonic() >= self._deadline_s:  # before all events: a worker may never cease to send them
            self._time_out()
        while not self._events:
            if self._ended:
                text = f"more than {MAX_UNREAD} pieces of the answer were not read: it was ended"
                raise TriptychError("timeout", text)
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if not isinstance(event, tuple):
            event()
            return
        worker, message = event
        match message:
            case Tokens():
                self._on_tokens(worker, message)
            case Prefilled():
                self._on_prefilled(worker, message)
            case "gone":
                self._on_gone(worker)
            case "joined":
                self._deadlines.hasten()  # what waits for workers
            case Encoded():
                self._encode.on_encoded(worker, message)
            case InputNeeded():
                self._on_needed(worker, message)
            case Failed():
                self._on_failed(worker, message)

    def _time_out(self) -> None:
        raise TriptychError("timeout", "the request did not end within the server's request_timeout_s")

    def _decodes(self, worker: Worker, attempt: int) -> bool:
        """Whether this worker, in this attempt, is the decoder: the job may have come back to it."""
        return worker is self._decoder and attempt == self._attempt

    def _on_tokens(self, worker: Worker, message: Tokens) -> None:
        if not self._decodes(worker, message.attempt):
            return  # from a replaced attempt
        self._begun = True
        if self._encode.pending and self._prefill.worker is None:
            self._encode.read(worker)  # tokens need all inputs, whatever encoders still report
        try:
            news = self._progress.accept(message, self._job.enough)
        except TriptychError as error:
            if not error.info.retryable:
                raise
            self._move("decoder_gone", pause_s=BACKOFF_S, abort=True)  # the connection broke, and was made anew
            return
        if news is not None:
            self._news.append(news)

    def _take_waiting_tokens(self) -> None:
        """Handle the tokens that wait next: where the client or this proxy lags behind, a sequence has several."""
        while self._events and not self._progress.done:
            event = self._events[0]
            if not isinstance(event, tuple) or not isinstance(event[1], Tokens):
                return
            self._events.popleft()
            self._on_tokens(event[0], event[1])

    def _on_needed(self, worker: Worker, message: InputNeeded) -> None:
        decodes = self._decodes(worker, message.request_attempt)
        if message.input_id != KV_INPUT_ID:
            if decodes or self._prefill.runs_on(worker, message.request_attempt):
                self._encode.on_needed(worker, message)
        elif decodes:
            self._begun = False
            self._prefill.on_needed(message.attempt)

    def _on_prefilled(self, worker: Worker, message: Prefilled) -> None:
        if not self._prefill.runs_on(worker, message.attempt):
            return  # from a replaced attempt
        if message.error is not None:
            self._on_prefill_lost(message.error, "prefill_error")
            return
        decoder = self._decoder
        assert decoder is not None
        for withheld in self._progress.prefilled(message.prompt_logprobs):
            self._on_tokens(decoder, withheld)  # before `finish`: inputs that the decoder needs since are not read yet
        if self._prefill.runs_on(worker, message.attempt):  # the job has not moved
            self._prefill.finish()

    def _on_failed(self, worker: Worker, message: Failed) -> None:
        error = message.error
        if self._prefill.runs_on(worker, message.attempt):
            self._on_prefill_lost(error, "prefill_error")
        elif self._decodes(worker, message.attempt):
            if error.code == "unavailable":  # for example, the decoder had lost this proxy and discarded all requests
                self._move("decoder_error", pause_s=BACKOFF_S)
                return
            self._withdraw(abort=False)
            raise self._job.error_of(error)
        elif worker not in (self._decoder, self._prefill.worker):
            self._encode.on_lost(worker, error, "encoder_error", answered=False)  # an attempt may have come later

    def _on_gone(self, worker: Worker) -> None:
        if worker is self._decoder:
            self._move("decoder_gone")
            return
        error = ErrorInfo("unavailable", f"{worker.instance_id} is gone")
        if worker is self._prefill.worker:
            self._on_prefill_lost(error, "prefill_gone")
        self._encode.on_lost(worker, error, "encoder_gone", answered=True)

    def _on_prefill_lost(self, error: ErrorInfo, reason: str) -> None:
        """Replace a lost prefill, unless the decoder has the whole prompt or must begin again, too."""
        pool, withholds = self._context.pool, self._progress.withholds
        final = not error.retryable and error.code != "internal_error"
        pairless = not pool.workers("prefill", matching=self._decoder) and bool(pool.workers(*WHOLE))
        if self._begun and not withholds:
            self._prefill.finish()
        elif (withholds and not final) or (error.retryable and pairless):
            self._move(reason, abort=True)
        else:
            self._prefill.fail(error, reason)

    def _move(self, reason: str, *, pause_s: float = 0.0, abort: bool = False) -> None:
        """Place the rest of the job anew, after `pause_s`; sequences of full length end here.

        Raises as `_place` does, and after MAX_MOVES.
        """
        self._news += self._progress.close(self._job.enough)
        self._withdraw(abort=abort)
        if self._progress.done:
            return
        self._moves += 1
        if self._moves > MAX_MOVES:  # a request that no decoder survives would take down all decoders in turn
            raise TriptychError("unavailable", f"{self._moves} decoders were lost with this request; it is given up")
        log.warning("request moves", request=self._job.request_id, reason=reason)
        self._context.count_retry(self._job.request_id, reason)
        if pause_s:
            self._deadlines.set("place", time.monotonic() + pause_s, self._place, early=True)
        else:
            self._place()

    def _place(self) -> None:
        """Put the job, or the rest of it, on workers, or wait for workers to come back.

        Raises as `DispatchContext.wait_s` does.
        """
        context, job = self._context, self._job
        placement = context.placer.choose(context.pool, self._cache_keys, media=bool(job.media))
        if placement is None:
            self._deadlines.set("place", time.monotonic() + context.wait_s(), self._place, early=True)
            return
        decoder, prefiller = placement.decoder, placement.prefiller
        decoder.load.requests += 1
        decoder.load.tokens += self._num_tokens
        self._decoder, self._attempt = decoder, next(self._attempts)
        self._deadlines.clear("place")
        self._deadlines.set("inquiry", time.monotonic() + INQUIRY_S, self._inquire)
        resumed = self._progress.start(job.enough, prefilled=prefiller is not None)
        log.debug("job placed", request=job.request_id, decoder=decoder.instance_id, attempt=self._attempt)
        decoder.send(job.message(resumed, prefilled=prefiller is not None, attempt=self._attempt))
        if prefiller is not None:
            self._prefill.start(prefiller, decoder, self._attempt, resumed)
        elif job.media:
            self._encode.send_all(decoder, self._attempt)

    def _inquire(self) -> None:
        """Ask the workers whether they have the job: one that lost it answers Failed, and tells nothing unasked."""
        self._deadlines.set("inquiry", time.monotonic() + INQUIRY_S, self._inquire)
        for worker, attempt in ((self._decoder, self._attempt), (self._prefill.worker, self._prefill.attempt)):
            if worker is not None:
                worker.notify(Inquiry(self._job.request_id, attempt))

    def _stop_sequences(self) -> None:
        """Stop the sequences that have ended here while others go on."""
        for index in (self._job.enough - self._stopped).intersection(self._progress.rest(frozenset())):
            self._stopped.add(index)
            if self._decoder is not None and not self._job.sampling.uses_beams:
                self._decoder.notify(StopSequence(self._job.request_id, index))

    def _release_decoder(self) -> Worker | None:
        decoder, self._decoder, self._begun = self._decoder, None, False
        self._deadlines.clear("inquiry")
        if decoder is not None:
            decoder.load.requests -= 1
            decoder.load.tokens -= self._num_tokens
        return decoder

    def _withdraw(self, *, abort: bool) -> None:
        """Withdraw the job from the decoder, with or without an `abort`, and from the prefill worker."""
        decoder = self._release_decoder()
        if decoder is not None and abort:
            decoder.notify(Abort(self._job.request_id))
        self._prefill.stop()
        self._encode.recall()

    def _end(self) -> None:
        """Release all claims; abort the job where workers are not done."""
        self._deadlines.stop()
        if self._ended:
            return
        self._ended = True
        if self._progress.done:
            self._release_decoder()
            self._encode.finish()
            if self._prefill.worker is not None:
                self._prefill.stop(abort=False)
            return
        self._context.metrics.aborts.inc(self._attempt > 0)  # else no worker had it
        for worker in list(self._encode.used):
            worker.notify(Abort(self._job.request_id))
        self._withdraw(abort=True)
