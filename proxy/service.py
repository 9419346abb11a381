"""Shared by all endpoints: the model, the workers, the limits."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Final, Literal, get_args

from broker.cluster.redis_client import connect
from common.config import Settings
from common.errors import TriptychError, invalid
from common.messages import WORKER_ROLES, Span
from common.model_info import ModelInfo
from common.process.host_memory import available_memory
from common.text.processor import Detokenizer, TextProcessor
from common.text.token_text import TokenTexts
from proxy.conversation.dialect import choose
from proxy.conversation.store import ResponseStore
from proxy.dispatch.dispatcher import Dispatcher
from proxy.dispatch.jobs import Job
from proxy.dispatch.placement import WHOLE, any_encodes, imbalance, missing
from proxy.dispatch.text_stream import TextStream
from proxy.dispatch.worker_pool import WorkerPool
from proxy.media.audio import AudioWindows
from proxy.media.intake import MediaIntake
from proxy.server.errors import Overloaded
from proxy.server.limits import ByteBudget, QueueDelayLimiter, RequestTickets, Ticket
from proxy.server.metrics import ProxyMetrics, Timelines
from proxy.server.request_context import AdmissionController, RequestContext

MEMORY_SHARE: Final = 4
"""Divisor of the free memory: this share may hold bodies and media. The rest is for parsed values, and for workers on
the same machine."""

LineName = Literal["text", "media"]
Problem = tuple[str, ...]
"""Why requests cannot be served: a public reason, and details that name instances. Empty while they can."""


class Service:
    """Everything an endpoint needs. Made once, before the proxy connects."""

    pool: WorkerPool
    """Set while the proxy is connected, as is `intake`."""
    intake: MediaIntake
    recordings: AudioWindows
    """Set while a proxy of a speech model is connected."""

    def __init__(self, settings: Settings, info: ModelInfo, instance_id: str) -> None:
        """Raises TriptychError for a model without tokenizer, a chat template or sampling defaults that cannot be used,
        and for a missing or invalid broker URL."""
        if settings.broker is None:
            raise invalid("a proxy needs --broker redis://host:port", "broker")
        self.settings, self.info, self.instance_id = settings, info, instance_id
        self.redis = connect(settings.broker)
        self.text = TextProcessor(info, settings.chat_template)
        self.metrics, self.timelines = ProxyMetrics(), Timelines()
        self.dispatcher = Dispatcher(settings, self.metrics, self.timelines)
        self.started_s = time.time()
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the connection to the cluster cannot go on (`pool.failure`): another process should start."""
        self.model_names = settings.served_model_name or (info.name,)
        """Names by which requests may call the model; answers have the first."""
        self.adapters = {f"{name}:{one}": one for name in self.model_names for one in info.adapters}
        """LoRA adapters by the names that requests and answers have for the model with one: `name:adapter`."""
        limit = settings.engine.max_model_len
        self.max_model_len = info.max_model_len if limit is None else min(limit, info.max_model_len)
        self.sampling_defaults = info.sampling_defaults(settings.generation_config)
        """Sampling of requests that give none, as fields of `SamplingParams`."""
        self.responses = ResponseStore(settings.response_store_bytes)
        self.dialect = choose(self.text.chat_template, settings.tool_call_parser, settings.reasoning_parser)
        """How the model writes reasoning and tool calls."""
        self.transcribes = info.is_encoder_decoder and info.media_kind == "audio"
        """Whether the model is a speech model, whose decoder transcribes one audio input."""
        self.lines = {name: QueueDelayLimiter(settings.max_queue_s) for name in get_args(LineName)}
        """Text alone does not wait for encoders, so that both queues move at different rates."""
        self.chat_lines: tuple[LineName, ...] = ("text",)
        """Queues that a conversation may join."""
        if info.media_kind is not None:
            self.chat_lines = ("media",) if self.transcribes else ("text", "media")
        budget = ByteBudget(settings.max_inflight_bytes or available_memory() // MEMORY_SHARE, self.metrics)
        self.admission = AdmissionController(
            settings.max_inflight, budget, settings.request_timeout_s, self.metrics, self.timelines, self.model_name
        )

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def failure(self) -> Problem:
        """Return why this process will serve no request any more."""
        return () if self.pool.failure is None else ("this proxy cannot go on", self.pool.failure)

    def not_ready(self) -> Problem:
        """Return why requests cannot be served now."""
        if self.admission.closing:
            return ("shutting down",)
        if self.admission.draining:
            return ("draining: it finishes what it has",)
        if failure := self.failure():
            return failure
        if not self.pool.broker_reachable:
            return ("the broker does not answer",)
        what = missing(self.pool)
        if what is None and self.info.media_kind is not None and not any_encodes(self.pool):
            what = "encoder worker"
        refused = (f"{name} is not used: {why}" for name, why in self.pool.refused.items())
        return () if what is None else (f"no {what}", *refused)

    def check_lines(self, *names: LineName) -> None:
        """Raise Overloaded where a new request would wait for the first token longer than max_queue_s in each queue."""
        excess_s = min(self.lines[name].excess_s for name in names)
        if excess_s > 0:
            self.metrics.refused.labels("wait").inc()
            limit_s, wait_s = self.settings.max_queue_s, math.ceil(excess_s + self.settings.max_queue_s)
            message = f"the first token would come after some {wait_s} s, more than the {limit_s:g} s allowed"
            raise Overloaded(f"{message} (max_queue_s); try again later", math.ceil(excess_s))

    def join_line(self, context: RequestContext, name: LineName, num_jobs: int = 1) -> RequestTickets:
        """Admit a request to a queue before media are fetched and text is tokenised. Raises as `check_lines` does."""
        self.check_lines(name)
        line = self.lines[name]
        context.tickets = RequestTickets(line, [line.join() for _ in range(num_jobs)])
        return context.tickets

    def update_gauges(self) -> None:
        self.metrics.broker_up.set(self.pool.broker_reachable)
        for name, line in self.lines.items():
            self.metrics.waiting.labels(name).set(line.num_waiting)
            self.metrics.expected_wait.labels(name).set(line.wait_s)
        for role in WORKER_ROLES:
            workers = self.pool.workers(role)
            self.metrics.workers.labels(role).set(len(workers))
            self.metrics.load_imbalance.labels(role).set(imbalance(workers))
        self._update_cell()

    def _update_cell(self) -> None:
        """Set the numbers of the cell as its workers put them into the registry, at most some seconds ago."""
        metrics, name = self.metrics, self.model_name
        records = [record for one, record in self.pool.seen.items() if one not in self.pool.refused]
        for role in WORKER_ROLES:
            work_s = sum(one.figures.get("outstanding_work_seconds", 0.0) for one in records if one.role == role)
            metrics.outstanding_work.labels(role).set(work_s)
        figures = [one.figures for one in records if one.role in ("decode", *WHOLE)]

        def total(figure: str) -> float:
            return sum(one.get(figure, 0.0) for one in figures)

        num_blocks = total("kv_blocks_usable")
        metrics.cell_waiting.labels(name).set(total("requests_waiting"))
        metrics.cell_running.labels(name).set(total("requests_running"))
        metrics.cell_kv_usage.labels(name).set(total("kv_blocks_used") / num_blocks if num_blocks else 0.0)
        metrics.cell_cache.clear()
        metrics.cell_cache.labels(name, str(self.settings.engine.block_size), str(round(num_blocks))).set(1)

    def check_model(self, model: str | None) -> None:
        """Raise TriptychError("model_not_found") for a model that is not served here."""
        if model is not None and model not in self.model_names and model not in self.adapters:
            names = ", ".join(map(repr, (*self.model_names, *self.adapters)))
            message = f"the model {model[:100]!r} does not exist here; this server serves {names}"
            raise TriptychError("model_not_found", message, "model")

    def token_limit(self, num_prompt_tokens: int, wanted: int | None, param: str) -> int:
        """Return the number of tokens to generate at most: the wanted number within the rest of the context.

        Media count as a token each here; the worker checks again with their sizes. Raises
        TriptychError("context_length_exceeded") where the prompt leaves no room.
        """
        limit = self.max_model_len
        if num_prompt_tokens >= limit:
            message = f"the context of {limit} tokens is too short for {num_prompt_tokens} prompt tokens"
            raise TriptychError("context_length_exceeded", f"{message}; shorten the prompt", param)
        return min(limit - num_prompt_tokens, limit if wanted is None else wanted)

    def generate(
        self,
        job: Job,
        context: RequestContext,
        ticket: Ticket,
        *,
        skip_special_tokens: bool = True,
        includes_stop: bool = False,
        continues_prompt: bool = False,
    ) -> TextStream:
        """Return the text of a job, which starts with the first delta and waits in `ticket` for the first token.

        With `continues_prompt` a blank between the prompt of a decoder-only model and the first word belongs to it.
        """
        self.timelines.begin(job.request_id, Span("proxy", self.instance_id, context.created_s, time.time()))
        tokens = self.dispatcher.run(self.pool, job, context.deadline_s)
        stop, least = job.sampling.stop, job.sampling.min_tokens
        before = job.prompt_token_ids if continues_prompt and not self.info.is_encoder_decoder else ()
        detokenizer = Detokenizer(self.text, stop, skip_special_tokens, least, includes_stop, before)
        return TextStream(job, tokens, self.text, self.metrics, context, ticket, detokenizer)

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.text.tokenizer)

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of the special tokens, which answers leave out."""
        added = self.text.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)
