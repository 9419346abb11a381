"""The sender's side of the handoff between prefill and decode: one task per request, from Generate to Prefilled.

    KvReady -> offer -> grant -> part after part, as far as they are computed -> last receipt -> Prefilled
                  later chunks prefill meanwhile ^

Any end of the task frees all memory of the request in the engine and in the handoffs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager as AsyncContext
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch

from broker.handoff.sender import Handoff, HandoffSender, Key, Part
from broker.transports.tensors import ITEM_BYTES
from common.errors import ErrorInfo, TriptychError
from common.messages import KV_INPUT_ID, Failed, Generate, Grant, KvOffer, Prefilled
from common.telemetry import SpanRecorder, get_logger
from engine.core.decoder_engine import DecoderEngine
from engine.device.pending_tensor import PendingTensor
from engine.state.events import Event, KvComputed, KvReady, PrefillEvent
from engine.state.spec import Table
from services.handoff.payloads import Outgoing, payload_of
from services.process.engine_thread import EngineThread
from services.worker_context import WorkerContext

PART_BYTES: Final = 8 * 2**20
"""A part is not larger, unless a single token is."""
RETRY_S: Final = 0.2
MAX_PENDING: Final = 16
"""Parts that wait on a GPU for the steps before them."""
MAX_OUTGOING: Final = 16
"""Parts that wait on a GPU to be sent; others wait in host memory."""

log = get_logger()


@dataclass
class _Prefill:
    """The state of one request. `num_computed` tokens can be exported; None before the first export."""

    message: Generate
    recorder: SpanRecorder
    ready: KvReady | None = None
    num_computed: int | None = None
    ended: Prefilled | None = None
    error: TriptychError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> Key:
        return self.message.request_id, KV_INPUT_ID, self.message.attempt

    def note(self, event: PrefillEvent | Failed) -> None:
        match event:
            case KvReady():
                self.ready = event
            case KvComputed(num_tokens=num_tokens):
                self.num_computed = num_tokens
            case Prefilled():
                self.ended = event
            case Failed(error=error):
                self.error = TriptychError(error.code, error.message, error.param)
        self.changed.set()

    async def next_report(self, timeout_s: float | None = None) -> None:
        """Wait for the next report of the engine, or `timeout_s`. Raises the request's error."""
        if self.error is None:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()
        self.check()

    def check(self) -> None:
        """Raise the request's error, if any."""
        if self.error is not None:
            raise self.error


class KvSender:
    """All prefills of this worker."""

    def __init__(
        self, context: WorkerContext, thread: EngineThread[DecoderEngine, Event], handoffs: HandoffSender
    ) -> None:
        self._context = context
        self._thread = thread
        self._handoffs = handoffs
        self._timeout_s = context.settings.handoff_timeout_s
        self._prefills: dict[str, tuple[_Prefill, asyncio.Task[None]]] = {}
        on_gpu = context.cuda is not None
        self._pending: AsyncContext[None] = asyncio.Semaphore(MAX_PENDING) if on_gpu else contextlib.nullcontext()
        self._taking = ThreadPoolExecutor(MAX_PENDING, "kv")  # not asyncio's threads: transports wait there, too
        self._outgoing = Outgoing(MAX_OUTGOING * PART_BYTES)
        self.outcomes: Counter[str] = Counter()
        self.num_parts_while_prefilling = 0
        """Parts sent before the rest of the prompt was computed."""

    @property
    def num_open(self) -> int:
        return len(self._prefills)

    def begin(self, message: Generate) -> asyncio.Task[None]:
        """Hand over the KV of a request, just submitted to the engine. Return the task, which ends with the reply."""
        prefill = _Prefill(message, SpanRecorder(self._context.instance_id))
        task = asyncio.create_task(self._run(prefill))
        self._prefills[message.request_id] = prefill, task
        return task

    def handle(self, event: PrefillEvent | Failed) -> None:
        """Accept a report of the engine; ignore reports on unknown requests."""
        found = self._prefills.get(event.request_id)
        if found is None:
            return
        prefill, _ = found
        prefill.note(event)
        if prefill.error is not None:
            self._handoffs.fail(prefill.key, prefill.error)

    def discard(self, request_id: str) -> None:
        """Stop without a reply; unknown requests are fine. The caller frees the memory of the engine."""
        found = self._prefills.pop(request_id, None)
        if found is not None:
            found[1].cancel()

    def close(self) -> None:
        for request_id in list(self._prefills):
            self.discard(request_id)

    async def _run(self, prefill: _Prefill) -> None:
        request_id, attempt = prefill.message.request_id, prefill.message.attempt
        error: ErrorInfo | None = None
        try:
            async with asyncio.timeout(self._context.settings.request_timeout_s):
                await self._hand_over(prefill)
        except TriptychError as caught:
            error = caught.info
        except TimeoutError:
            error = ErrorInfo("timeout", "the keys and values of the prompt were not in place in time")
        except Exception as caught:  # a bug: the proxy must learn of it, and the next request may succeed
            log.error("a prefill failed unexpectedly", request=request_id, exc_info=True)
            error = ErrorInfo("internal_error", f"the prefill worker failed: {type(caught).__name__}")
        finally:
            self._handoffs.close(prefill.key)
        del self._prefills[request_id]
        self.outcomes["ok" if error is None else error.code] += 1
        if error is not None:
            self._thread.submit(lambda engine: engine.abort(request_id))
            self._context.reply(request_id, Prefilled(request_id, attempt, error))
        else:
            assert prefill.ended is not None
            ended = msgspec.structs.replace(prefill.ended, spans=[*prefill.ended.spans, *prefill.recorder.spans])
            self._context.metrics.observe_spans(ended.spans)
            self._context.reply(request_id, ended)

    async def _hand_over(self, prefill: _Prefill) -> None:
        """Return once all KV is in place. Raises TriptychError or TimeoutError otherwise."""
        request_id = prefill.message.request_id
        while prefill.ready is None:
            await prefill.next_report()
        prefill.recorder.start("grant")
        offer = self._make_offer(prefill)
        receiver = await self._context.find_instance(prefill.message.prefill_for, self._handoffs.presence.get)
        prefill.check()  # the engine may have failed the request before there was a handoff to fail
        handoff = await self._handoffs.offer(offer, receiver)
        prefill.recorder.end("grant")
        grant = handoff.grant.result()
        if grant.status == "granted":
            self._thread.submit(lambda engine: engine.grant_kv(request_id))
            for table, first, last in _wanted(offer, grant):
                await self._send(prefill, handoff, table, first, last)
            self._handoffs.complete(handoff)
            self._context.hops.mark_sent(prefill.key, handoff.times_s)
        self._thread.submit(lambda engine: engine.end_prefill(request_id))
        while prefill.ended is None:
            await prefill.next_report()

    def _make_offer(self, prefill: _Prefill) -> KvOffer:
        assert prefill.ready is not None
        return msgspec.structs.replace(
            prefill.ready.offer,
            attempt=prefill.message.attempt,
            sender=self._context.instance_id,
            deadline_s=time.monotonic() + self._context.settings.request_timeout_s,
            request_attempt=prefill.message.prefill_for_attempt,
        )

    async def _send(self, prefill: _Prefill, handoff: Handoff, table: Table, first: int, last: int) -> None:
        """Send the tokens `first` to `last` of a table as soon as computed."""
        offer = handoff.offer
        assert isinstance(offer, KvOffer)
        most = tokens_per_part(offer.token_shape if table == "self" else offer.cross_shape, offer.dtype)
        while first < last:
            computed = await self._computed(prefill, handoff, table, first, last)
            end = min(computed, first + most)
            await self._send_part(prefill, handoff, table, first, end)
            first = end

    async def _send_part(self, prefill: _Prefill, handoff: Handoff, table: Table, first: int, last: int) -> None:
        """Send tokens that are computed; their copy is freed at the end."""
        offer = handoff.offer
        assert isinstance(offer, KvOffer)
        tensor = await self._export(prefill, handoff, table, first, last)
        part = Part(list(tensor.shape), offer.dtype, payload_of(tensor), table, first)
        self.num_parts_while_prefilling += prefill.num_computed is None or prefill.num_computed < offer.num_tokens
        await self._handoffs.send(handoff, part)

    async def _computed(self, prefill: _Prefill, handoff: Handoff, table: Table, first: int, last: int) -> int:
        """Return the end of the computed tokens. Tokens of cross-attention are computed all at once."""
        while True:
            if prefill.num_computed is not None:
                computed = last if table == "cross" else min(last, prefill.num_computed)
                if computed > first:
                    return computed
            self._handoffs.keep_alive(handoff)
            await prefill.next_report(RETRY_S)

    async def _export(self, prefill: _Prefill, handoff: Handoff, table: Table, first: int, last: int) -> torch.Tensor:
        """Return the KV of some tokens, once present (again)."""
        request_id = prefill.message.request_id

        def export(engine: DecoderEngine) -> PendingTensor | None:
            return engine.export_kv(request_id, table, first, last)

        def take(pending: PendingTensor) -> torch.Tensor:
            return self._outgoing.keep(pending.wait())

        while True:
            async with self._pending:
                if (pending := await self._thread.call(export, self._timeout_s)) is not None:
                    if not pending.is_cuda:
                        return pending.wait()
                    return await asyncio.get_running_loop().run_in_executor(self._taking, take, pending)
            # The request was preempted. The engine reports the end of its recomputation, or its return.
            self._handoffs.keep_alive(handoff)
            await prefill.next_report(RETRY_S)


def tokens_per_part(token_shape: Sequence[int], dtype: str) -> int:
    """Return the number of tokens of a shape in one part."""
    return max(1, PART_BYTES // max(1, math.prod(token_shape) * ITEM_BYTES[dtype]))


def _wanted(offer: KvOffer, grant: Grant) -> Iterator[tuple[Table, int, int]]:
    """Yield the ranges wanted by the receiver: (table, first token, last token + 1)."""
    if not grant.cross_cached:
        yield "cross", 0, offer.num_encoder_tokens
    yield "self", grant.first_token, offer.num_tokens
