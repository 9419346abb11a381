"""What the endpoints share: the model, the workers, the limits."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Literal, ParamSpec, TypeVar, get_args

from redis.asyncio import Redis

from common.config import Settings
from common.errors import TriptychError
from common.messages import WORKER_ROLES, Span
from common.model_info import ModelInfo
from common.text.processor import TextProcessor
from common.text.token_text import TokenTexts
from proxy.api.logprobs import LogprobShapes
from proxy.api.sampling_fields import GenerationRequest
from proxy.dispatch.dispatcher import Dispatcher
from proxy.dispatch.jobs import Job, response_id
from proxy.dispatch.placement import encodes_for, missing, prompt_readers
from proxy.dispatch.router import imbalance
from proxy.dispatch.text_stream import Delta, TextStream
from proxy.dispatch.worker_pool import WorkerPool
from proxy.media.audio_windows import AudioWindows
from proxy.media.intake import MediaIntake
from proxy.server.errors import Overloaded
from proxy.server.metrics import ProxyMetrics
from proxy.server.queue_delay import QueueDelayLimiter, RequestTickets, Ticket, retry_after_s
from proxy.server.request_context import AdmissionController, RequestContext
from proxy.server.timeline import Timelines

LineName = Literal["text", "media"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """Why requests cannot be served: what everybody may know, and what names instances and what they serve."""

    what: str
    details: tuple[str, ...] = ()

    def text(self, *, with_details: bool) -> str:
        return "; ".join((self.what, *self.details) if with_details else (self.what,))


@dataclass
class Service:
    """Everything an endpoint needs. Made once, before the proxy connects."""

    settings: Settings
    info: ModelInfo
    instance_id: str
    redis: Redis
    text: TextProcessor
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    timelines: Timelines
    admission: AdmissionController
    pool: WorkerPool = field(init=False)
    """Set while the proxy is connected, as is `intake`."""
    intake: MediaIntake = field(init=False)
    on_failure: Callable[[], None] = lambda: None
    """Called when the connection to the cluster cannot go on (`pool.failure`): another process should be started."""
    lines: dict[LineName, QueueDelayLimiter] = field(init=False)
    """Text alone does not wait for encoders: its line moves faster, or the other one does."""
    started_s: float = field(default_factory=time.time)
    recordings: AudioWindows = field(init=False)
    """Set while a proxy of a speech model is connected."""

    def __post_init__(self) -> None:
        self.lines = {name: QueueDelayLimiter(self.settings.max_queue_s) for name in get_args(LineName)}

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.info.name

    @property
    def max_model_len(self) -> int:
        limit = self.settings.engine.max_model_len
        return self.info.max_model_len if limit is None else min(limit, self.info.max_model_len)

    def failure(self) -> Problem | None:
        """Why this process will serve no request any more; None if it may."""
        failure = self.pool.failure
        return None if failure is None else Problem("this proxy cannot go on", (failure,))

    def not_ready(self) -> Problem | None:
        """Why requests cannot be served now; None if they can."""
        if self.admission.closing:
            return Problem("shutting down")
        if (failure := self.failure()) is not None:
            return failure
        if not self.pool.broker_reachable:
            return Problem("the broker does not answer")
        if (what := missing(self.pool)) is not None:
            return Problem(f"no {what}", self._refusals())
        if self.info.media_kind is not None and not any(
            encodes_for(self.pool, reader) for reader in prompt_readers(self.pool)
        ):
            return Problem("no encoder worker", self._refusals())
        return None

    def _refusals(self) -> tuple[str, ...]:
        return tuple(f"{name} is not used: {why}" for name, why in self.pool.refused.items())

    def check_line(self, line: LineName) -> None:
        """Raises Overloaded where a request that comes now would wait for its first token longer than max_queue_s."""
        excess_s = self.lines[line].excess_s
        if excess_s > 0:
            self.metrics.refused.labels("wait").inc()
            wait_s, limit_s = excess_s + self.settings.max_queue_s, self.settings.max_queue_s
            message = f"the first token would come after some {wait_s:.0f} s, more than the {limit_s:g} s allowed"
            raise Overloaded(f"{message} (max_queue_s); try again later", retry_after_s(excess_s))

    def check_lines(self) -> None:
        """Raises as `check_line` does where each line that requests may join is too long: before one has been read."""
        joined: tuple[LineName, ...] = ("text", "media")
        if self.transcribes:
            joined = ("media",)
        elif self.info.media_kind is None:
            joined = ("text",)
        self.check_line(min(joined, key=lambda name: self.lines[name].excess_s))

    def join_line(self, exchange: RequestContext, line: LineName, num_jobs: int = 1) -> RequestTickets:
        """Let a request in, before its media are fetched and its text is tokenised; where its jobs wait for their first
        tokens. Raises as `check_line` does."""
        self.check_line(line)
        exchange.places = RequestTickets(self.lines[line], num_jobs)
        return exchange.places

    def update_gauges(self) -> None:
        for name, line in self.lines.items():
            self.metrics.waiting.labels(name).set(line.num_waiting)
            self.metrics.expected_wait.labels(name).set(line.wait_s)
        for role in WORKER_ROLES:
            workers = self.pool.workers(role)
            self.metrics.workers.labels(role).set(len(workers))
            self.metrics.load_imbalance.labels(role).set(imbalance(workers))

    def check_model(self, model: str | None) -> None:
        """Raises TriptychError("model_not_found") for a model that is not served here."""
        if model is not None and model != self.model_name:
            message = f"the model {model[:100]!r} does not exist here; this server serves {self.model_name!r}"
            raise TriptychError("model_not_found", message, "model")

    def token_limit(self, num_prompt_tokens: int, wanted: int | None, param: str) -> int:
        """How many tokens may be generated: what was asked for, or the rest of the context.

        Media are counted as one token each here; the worker, which knows their size, has the last word.
        Raises TriptychError("context_length_exceeded") where prompt and answer cannot fit.
        """
        limit = self.max_model_len
        if num_prompt_tokens >= limit or (wanted is not None and num_prompt_tokens + wanted > limit):
            asked = "" if wanted is None else f" and {wanted} to generate"
            message = f"the context of {limit} tokens is too short for {num_prompt_tokens} prompt tokens{asked}"
            raise TriptychError("context_length_exceeded", f"{message}; shorten the prompt or lower max_tokens", param)
        return wanted if wanted is not None else limit - num_prompt_tokens

    @property
    def transcribes(self) -> bool:
        """Whether this is a speech model: its decoder hears one clip and writes it down."""
        return self.info.is_encoder_decoder and self.info.media_kind == "audio"

    def generation(
        self, job: Job, exchange: RequestContext, place: Ticket, body: GenerationRequest | None = None
    ) -> TextStream:
        """A job that is sent off now, and waits in `place` for its first token."""
        skip_special_tokens = body is None or body.skip_special_tokens is not False
        return TextStream(
            job,
            self.text,
            self.metrics,
            exchange.arrival_s,
            on_first=place.begin,
            skip_special_tokens=skip_special_tokens,
        )

    def shapes(self, body: GenerationRequest) -> LogprobShapes:
        """How this request is told log-probabilities."""
        return LogprobShapes(self.token_texts, body.num_logprobs or 0, bool(body.return_tokens_as_token_ids))

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.text.tokenizer)

    def deltas(self, generation: TextStream, exchange: RequestContext) -> AsyncGenerator[Delta]:
        """Start a job; the text of it, to its end or until closed. The timeline's bar "proxy" ends here."""
        job = generation.job
        timeline = response_id(job.request_id)
        if self.timelines.open(timeline):
            self.timelines.add(timeline, [Span("proxy", self.instance_id, exchange.created_s, time.time())])
        return generation.deltas(self.dispatcher.run(self.pool, job, exchange.deadline_s))
