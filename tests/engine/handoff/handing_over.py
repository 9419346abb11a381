"""Two engines in one process, one that prefills and one that decodes, and what stands between them in a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from common.messages import KV_INPUT_ID, Failed, Grant, InputNeeded, KvOffer, Prefilled, Receipt, TokenLogprob
from common.model_info import ModelInfo
from engine.core.decoder_engine import DecoderEngine
from engine.handoff.offer_check import KvPart
from engine.state.events import Event, KvComputed, KvReady
from engine.state.spec import Table
from tests.engine.driving import FAR_S, MAX_STEPS, Driver, Generated, Job, make_engine


def quick_engine(info: ModelInfo, num_blocks: int = 300, **options: Any) -> DecoderEngine:
    """An engine all of whose pools are given: it measures nothing at start."""
    return make_engine(info, num_blocks, **{"encoder_cache_bytes": 2**20, "swap_bytes": 2**21, **options})


@dataclass
class Transfer:
    """The sender's view of one handoff, as a service would keep it. `unsent` are ranges by table."""

    attempt: int
    offer: KvOffer | None = None
    num_computed: int = -1
    granted: bool = False
    unsent: dict[Table, tuple[int, int]] = field(default_factory=dict)
    part: int = 0


class Sender(Driver):
    """An engine that prefills. Its events on handoffs go to `on_event`."""

    def __init__(self, engine: DecoderEngine, on_event: Callable[[Event], None]) -> None:
        super().__init__(engine)
        self._on_event = on_event
        self.prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self.ended: set[str] = set()

    def _take(self, event: Event) -> None:
        super()._take(event)
        if isinstance(event, Prefilled):
            self.ended.add(event.request_id)
            self.prompt_logprobs[event.request_id] = event.prompt_logprobs
        self._on_event(event)


class Receiver(Driver):
    """An engine that decodes what others have prefilled. It has no encoder but for what it computes again."""

    def __init__(self, engine: DecoderEngine, on_event: Callable[[Event], None]) -> None:
        super().__init__(engine)
        self._on_event = on_event

    def _take(self, event: Event) -> None:
        if getattr(event, "input_id", None) != KV_INPUT_ID:
            super()._take(event)
        self._on_event(event)


class Pair:
    """Hands every request from `sender` to `receiver` in parts of `part_tokens`, while either of them computes."""

    def __init__(self, prefill: DecoderEngine, decode: DecoderEngine, *, part_tokens: int = 5) -> None:
        self.sender = Sender(prefill, self._from_sender)
        self.receiver = Receiver(decode, self._from_receiver)
        self.part_tokens = part_tokens
        self.transfers: dict[str, Transfer] = {}
        self.num_parts_while_prefilling = 0

    def add(self, job: Job) -> None:
        self.hand_over(job)
        self.receiver.add(job, offer=False, prefilled=True)

    def give_up(self, name: str) -> None:
        """The request is not wanted any more."""
        del self.transfers[name]
        for engine in (self.sender.engine, self.receiver.engine):
            engine.abort(name)

    def hand_over(self, job: Job, attempt: int = 0) -> None:
        """Prefill a request that the receiver knows."""
        self.transfers[job.name] = Transfer(attempt)
        self.sender.add(job, prefill_only=True)

    def step(self) -> bool:
        """What each engine's thread does, and the service between two steps. Returns whether anybody had work."""
        worked = False
        for driver in (self.sender, self.receiver):
            if driver.engine.has_work():  # else its thread would sleep
                driver.step()
                worked = True
            for name in list(self.transfers):
                worked = self._send(name) or worked
        return worked

    def finish(self) -> Generated:
        """Both to their end. Nothing has a deadline here: if neither has work before that, they would hang."""
        engines = self.sender.engine, self.receiver.engine
        for _ in range(MAX_STEPS):
            worked = self.step()
            if all(engine.is_empty() and not engine.has_work() for engine in engines):
                return self.receiver.tokens
            assert worked, [engine.stats() for engine in engines]
        raise AssertionError(f"no end: {[engine.stats() for engine in engines]}")

    # --- what the two services do

    def _from_sender(self, event: Event) -> None:
        transfer = self.transfers.get(event.request_id)
        if transfer is None:
            return
        if isinstance(event, KvReady):
            transfer.offer = event.offer
            offer = msgspec.structs.replace(event.offer, attempt=transfer.attempt, deadline_s=FAR_S)
            self.receiver.engine.offer(offer)
        elif isinstance(event, KvComputed):
            transfer.num_computed = event.num_tokens
        elif isinstance(event, Failed):
            del self.transfers[event.request_id]
            self.receiver.engine.abort(event.request_id)

    def _from_receiver(self, event: Event) -> None:
        transfer = self.transfers.get(event.request_id)
        if isinstance(event, InputNeeded) and event.input_id == KV_INPUT_ID:
            assert transfer is not None
            self.sender.engine.abort(event.request_id)
            self.hand_over(self.sender.jobs[event.request_id], transfer.attempt + 1)
        if transfer is None or getattr(event, "attempt", None) != transfer.attempt or event.input_id != KV_INPUT_ID:
            return
        assert not isinstance(event, Receipt) or event.status == "stored", event
        if isinstance(event, Grant) and event.status == "granted":
            assert transfer.offer is not None
            cross = 0 if event.cross_cached else transfer.offer.num_encoder_tokens
            transfer.granted = True
            transfer.unsent = {"cross": (0, cross), "self": (event.first_token, transfer.offer.num_tokens)}
            self.sender.engine.grant_kv(event.request_id)
        elif isinstance(event, Grant) and event.status == "cached":
            self._end(event.request_id)
        elif isinstance(event, Grant):
            self.sender.engine.abort(event.request_id)
            if event.status == "refused":
                del self.transfers[event.request_id]

    def _send(self, name: str) -> bool:
        """The next part of each table of a granted handoff, as far as it has been computed. False for nothing."""
        transfer = self.transfers[name]
        if not transfer.granted:
            return False
        num_sent = transfer.part
        for table, (first, last) in transfer.unsent.items():
            there = last if table == "cross" else min(last, transfer.num_computed)
            end = min(there, first + self.part_tokens)
            arriving = self.sender.engine.export_kv(name, table, first, end) if first < end else None
            if arriving is not None:
                if transfer.offer is not None and transfer.num_computed < transfer.offer.num_tokens:
                    self.num_parts_while_prefilling += 1
                transfer.unsent[table] = end, last
                self.deliver(name, transfer.attempt, transfer.part, table, first, arriving.wait())
                transfer.part += 1
        if all(first >= last for first, last in transfer.unsent.values()):
            self._end(name)
        return transfer.part > num_sent

    def deliver(self, name: str, attempt: int, part: int, table: Table, first: int, tokens: torch.Tensor) -> None:
        self.receiver.engine.deliver_kv(name, attempt, KvPart(part, table, first, tokens))

    def _end(self, name: str) -> None:
        del self.transfers[name]
        self.sender.engine.end_prefill(name)
