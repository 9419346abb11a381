"""Workers with a decoder: requests and handed-over inputs in, events of the engine out.

DecoderService translates between messages and the engine's commands and events; the engine decides. The roles are
subclasses with the requests that they refuse.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine
from typing import Any, ClassVar

from broker.handoff.channels import ChannelName, Delivery
from broker.handoff.sender import key_of
from common.errors import ErrorInfo
from common.messages import (
    Encode,
    Encoded,
    Failed,
    Generate,
    InputNeeded,
    InstanceRecord,
    Role,
    StopSequence,
    Tokens,
    ToWorker,
)
from common.sampling_params import MAX_SEQUENCES
from common.telemetry import get_logger
from engine.cache.block_pool import IntegrityError
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event, PrefillEvent
from services.encode.local_encode import LocalEncodeStage
from services.handoff.receiver import HandoffReceiver
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext

log = get_logger()


class DecoderService(ABC):
    """A `RoleService`; subclasses refuse requests in `_refusal`."""

    role: ClassVar[Role]
    channels: ClassVar[tuple[ChannelName, ...]] = ("metadata",)
    always_encodes: ClassVar[bool] = False
    may_encode: ClassVar[bool] = False
    """Whether the role encodes as a fallback if the settings say so."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._outcomes: Counter[str] = Counter()  # of requests, beside those of handoffs
        self._num_integrity_failures = 0
        self._is_checked = True  # whether the engine has done nothing since its last check
        self.thread: EngineThread[DecoderEngine, Event] = EngineThread(
            build=self._build,
            step=self._step,
            next_deadline_s=lambda engine: engine.next_deadline_s(),
            answer=lambda engine: engine.answer(),
        )
        self._receiver = HandoffReceiver(context, self.thread)
        self.tensor_address = self._receiver.tensor_address
        at_need = self.may_encode and context.settings.encoder_fallback and context.info.media_kind is not None
        encodes, is_fallback = at_need or self.always_encodes, not self.always_encodes
        self._encoding = LocalEncodeStage(context, self.thread, is_fallback) if encodes else None
        context.metrics.tallies["handoffs"] = lambda: self._receiver.outcomes + self._outcomes
        context.metrics.gauges["integrity_failures"] = lambda: self._num_integrity_failures

    def _build(self) -> DecoderEngine:
        context, beside = self._context, 0 if self._encoding is None else self._encoding.taken_bytes
        lease_s = context.settings.handoff_timeout_s
        return DecoderEngine(context.info, context.engine_config, context.instance_id, lease_s, beside)

    @property
    def encodes(self) -> bool:
        return self._encoding is not None

    @property
    def threads(self) -> tuple[EngineThread[Any, Any], ...]:
        """The encoder's first: the decoder's pools take the memory that is left."""
        return (self._encoding.thread, self.thread) if self._encoding is not None else (self.thread,)

    async def start(self, own: InstanceRecord) -> None:
        if self._encoding is not None:
            await self._encoding.start()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        encoding = [] if self._encoding is None else [self._encoding.run()]
        return [self._receiver.run(), self._read_events(), *encoding]

    async def review(self) -> None:  # noqa: B027 (only prefill workers send)
        """Do nothing: offers of a lost sender end by their deadline, or by the next attempt."""

    def close(self) -> None:
        if self._encoding is not None:
            self._encoding.close()
        self._receiver.close()

    # --- from proxies

    def handle_request(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Generate):
            self._generate(proxy, message)
        elif isinstance(message, StopSequence):
            request_id, index = message.request_id, message.index
            request = self._context.proxies.get(request_id)
            if request is not None and request.proxy == proxy:
                self.thread.submit(lambda engine: engine.stop_sequence(request_id, index))
        elif isinstance(message, Encode):
            self._encode(proxy, message)

    def abort(self, request_id: str) -> None:
        self._give_up(request_id)
        self.thread.submit(lambda engine: engine.abort(request_id))

    def handle_delivery(self, delivery: Delivery) -> None:
        self._receiver.handle(delivery)

    @abstractmethod
    def _refusal(self, message: Generate) -> str | None:
        """Return the reason to refuse a request; None to accept."""

    def _refuse(self, proxy: bytes, message: Generate, error: ErrorInfo) -> None:
        self._context.send(proxy, Failed(message.request_id, error, message.attempt))

    def _generate(self, proxy: bytes, message: Generate) -> None:
        if (why := self._refusal(message)) is not None:
            what = f"{self._context.instance_id} is a {self.role} worker: {why}"
            self._refuse(proxy, message, ErrorInfo("invalid_request", what))
            return
        proxies, request_id = self._context.proxies, message.request_id
        known = proxies.get(request_id)
        if known is not None:
            if not proxies.owns(proxy, request_id):
                what = f"another proxy has a request {request_id} on {self._context.instance_id}"
                self._refuse(proxy, message, ErrorInfo("unavailable", f"{what}: try again"))
                return
            if known.proxy == proxy and message.attempt <= known.attempt:
                self._outcomes["duplicate_request"] += 1
                return
            # An older attempt, or on a connection that this proxy has closed: no answer is awaited.
            self._outcomes["taken_over"] += known.proxy != proxy
            self.abort(request_id)
        self._begin(proxy, message)

    def _begin(self, proxy: bytes, message: Generate) -> None:
        num_tokens, sampling = len(message.prompt_token_ids), message.sampling
        if not message.prefill_for:  # before the engine has checked the request: finite for any sampling parameters
            most = min(max(0, sampling.max_tokens), self._context.info.max_model_len)
            num_tokens += most * min(max(0, sampling.num_sequences), MAX_SEQUENCES)
        self._context.proxies.add(proxy, message.request_id, num_tokens, message.attempt)
        self.thread.submit(lambda engine: engine.add_request(message))

    def _encode(self, proxy: bytes, message: Encode) -> None:
        own = self._context.instance_id
        if self._encoding is not None and message.destination == own:
            self._encoding.submit(proxy, message)
            return
        why = "it encodes only for itself" if self._encoding is not None else "it has no encoder"
        error = ErrorInfo("invalid_request", f"{own} is a {self.role} worker: {why}")
        self._context.send(proxy, Encoded(*key_of(message), error))

    # --- from the engine

    def _step(self, engine: DecoderEngine) -> list[Event]:
        """Step the engine, on the engine's thread; check the integrity each time the engine becomes empty."""
        events = engine.step()
        if not engine.is_empty():
            self._is_checked = False
        elif not self._is_checked:
            self._is_checked = True
            try:
                engine.check_integrity()
            except IntegrityError as error:  # a leak is no reason to discard all requests: say it loudly
                self._num_integrity_failures += 1
                log.error("the engine's books do not add up", error=str(error))
        return events

    async def _read_events(self) -> None:
        while True:
            self._handle_events(await self.thread.events.get())

    def _handle_events(self, events: list[Event]) -> None:
        """Handle events, but for those of an aborted attempt: the request may be here again."""
        tokens: dict[bytes, list[Tokens]] = {}  # by proxy
        for event in events:
            if isinstance(event, Tokens | Failed | PrefillEvent):
                request = self._context.proxies.get(event.request_id)
                if request is None or request.attempt != event.attempt:
                    continue
                if isinstance(event, Tokens):
                    if not request.has_begun:
                        request.has_begun = True
                        self._context.metrics.first_token_seconds.observe(time.monotonic() - request.arrived_s)
                        self._receiver.started(event.request_id, event.attempt)
                    tokens.setdefault(request.proxy, []).append(event)
                    continue
                self._send_tokens(tokens)  # before the error of a request
            self._handle_event(event)
        self._send_tokens(tokens)

    def _handle_event(self, event: Event) -> None:
        assert not isinstance(event, Tokens | PrefillEvent)  # `prefill_only` alone has prefill events
        if isinstance(event, Failed):
            self._fail(event)
        elif isinstance(event, InputNeeded):
            self._outcomes["input_needed"] += 1
            # Behind the last word of this process's own encoder, that the input was stored: this is no failure.
            asyncio.get_running_loop().call_soon(self._context.reply, event.request_id, event)
        elif self._encoding is None or not self._encoding.sink.settle(event):
            self._receiver.settle(event)

    def _fail(self, event: Failed) -> None:
        self._context.reply(event.request_id, event)
        self._give_up(event.request_id)

    def _send_tokens(self, tokens: dict[bytes, list[Tokens]]) -> None:
        """Send the tokens of each proxy together. A request ends with the first tokens that are not sent: no others may
        follow these."""
        while tokens:
            proxy, events = tokens.popitem()
            for event, outcome in zip(events, self._context.send(proxy, *events), strict=True):
                if outcome != "sent":
                    self.abort(event.request_id)
                elif event.done:
                    self._context.metrics.observe_spans(event.spans)
                    self._context.proxies.remove(event.request_id)

    def _give_up(self, request_id: str) -> None:
        """Forget a request before its end: its items stop, too."""
        self._context.proxies.remove(request_id)
        if self._encoding is not None:
            self._encoding.abort(request_id)


class PrefillDecodeService(DecoderService):
    """Receives inputs from encoders; encodes itself without any encoder, under `Settings.encoder_fallback`."""

    role: ClassVar[Role] = "prefill_decode"
    may_encode = True

    def _refusal(self, message: Generate) -> str | None:
        if message.prefill_for or message.prefilled:
            return "it prefills and decodes a request as a whole"
        return None


class EncodePrefillDecodeService(PrefillDecodeService):
    """All three stages in one process: every other topology is compared with this form."""

    role: ClassVar[Role] = "encode_prefill_decode"
    always_encodes = True


class DecodeService(DecoderService):
    """Receives KV from prefill workers, and inputs from encoders for requests to be computed again."""

    role: ClassVar[Role] = "decode"

    def _refusal(self, message: Generate) -> str | None:
        return None if message.prefilled else "the prompt has to be prefilled elsewhere, send it with `prefilled`"
