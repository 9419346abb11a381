"""Drives a decoder engine with jobs of any kind, plays the encoder for it, and watches its books and its KV cache."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Any

import torch

from common.config import EngineConfig
from common.messages import Failed, Generate, Grant, InputLayout, InputNeeded, InputSlot, Offer, Resumed, Tokens
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event
from engine.state.request import Request, Sequence
from tests.equality.runs import kv_bytes

FAR_S = 1e12
MAX_STEPS = 4000
Generated = dict[tuple[str, int], list[int]]
"""By request and index."""


def greedy(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **fields})


def sampled(max_tokens: int = 12, seed: int = 5, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "ignore_eos": True, "max_tokens": max_tokens, **fields})


def text_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def text(name: str, length: int, params: SamplingParams, **fields: Any) -> Job:
    """A prompt of `length` tokens that follow from the name."""
    return Job(name, text_tokens(zlib.crc32(name.encode()), length), params, **fields)


@dataclass(frozen=True)
class Job:
    """One request. `media` are (content, rows): what the encoder would make of a content follows from its name."""

    name: str
    token_ids: list[int]
    params: SamplingParams
    media: list[tuple[str, int]] = field(default_factory=list)
    priority: int = 0
    resumed: ListOf[Resumed] = ()

    def slots(self, info: ModelInfo) -> list[InputSlot]:
        placed = [index for index, token in enumerate(self.token_ids) if token == info.placeholder_token_id]
        places: list[int | None] = [None] * len(self.media) if info.is_encoder_decoder else [*placed]
        kind = info.media_kind or "image"
        return [InputSlot(i, kind, self.media[i][0], place) for i, place in enumerate(places)]


def make_engine(info: ModelInfo, num_blocks: int | None = None, block_size: int = 4, **options: Any) -> DecoderEngine:
    """An engine with a pool of so many usable blocks, whose steps do not depend on how long the last ones took."""
    if num_blocks is not None:
        options["kv_cache_bytes"] = kv_bytes(info, num_blocks, block_size)
    usual = {"max_num_seqs": 16, "block_size": block_size, "itl_objective_ms": 0}
    return DecoderEngine(info, EngineConfig(**{**usual, **options}))


class Driver:
    """Steps an engine and answers it. After every step its books add up, and no computed key or value has changed."""

    def __init__(self, engine: DecoderEngine, *, watch: bool = True) -> None:
        self.engine = engine
        self.tokens: Generated = {}
        self.ends: dict[tuple[str, int], Tokens] = {}
        self.failures: dict[str, Failed] = {}
        self.events: list[Event] = []
        self.num_sent = 0
        self.num_steps = 0
        self.jobs: dict[str, Job] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._watch = KvWatch(engine) if watch else None

    def add(self, job: Job, *, offer: bool = True, prefill_only: bool = False, prefilled: bool = False) -> None:
        self.jobs[job.name] = job
        slots = job.slots(self.engine.info)
        more = job.priority, list(job.resumed), "decode" if prefill_only else "", prefilled
        self.engine.add_request(Generate(job.name, job.token_ids, slots, job.params, *more))
        if offer:
            for slot in slots:
                self.offer(job.name, slot.input_id)

    def offer(self, name: str, input_id: int) -> None:
        info, job = self.engine.info, self.jobs[name]
        content, rows = job.media[input_id]
        if info.is_encoder_decoder:
            layout = InputLayout(rows, [])
        elif info.has_cross_attention:
            layout = InputLayout(rows, [(info.placeholder_token_id or 0, 1)], num_visible_tokens=max(1, rows - 2))
        else:
            layout = InputLayout(rows, [(info.placeholder_token_id or 0, rows)], (1, 1, rows))
        width = self.engine.runner.spec.encoder_width
        attempt = self._attempts[name, input_id] = self._attempts.get((name, input_id), -1) + 1
        self.engine.offer(make_offer((name, input_id, attempt), rows, width, layout, content))

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.num_steps += 1
        self.engine.check_integrity()
        if self._watch is not None:
            self._watch.look()
        for event in events:
            self._take(event)
        self.events += events
        return events

    def step_while(self, condition: Callable[[], object]) -> None:
        """Step as long as a condition holds."""
        first = self.num_steps
        while condition():
            assert self.num_steps - first < MAX_STEPS, f"no end after {MAX_STEPS} steps: {self.engine.stats()}"
            self.step()

    def step_to_token(self, count: int, name: str, index: int = 0) -> None:
        """Step until a sequence has so many tokens."""
        self.step_while(lambda: len(self.tokens.get((name, index), ())) < count)

    def _take(self, event: Event) -> None:
        if isinstance(event, Grant) and event.status == "granted":
            content, rows = self.jobs[event.request_id].media[event.input_id]
            generator = torch.Generator().manual_seed(zlib.crc32(content.encode()))
            tensor = torch.randn(rows, self.engine.runner.spec.encoder_width, generator=generator)
            self.num_sent += 1
            self.engine.deliver(event.request_id, event.input_id, event.attempt, tensor)
        elif isinstance(event, InputNeeded):
            self.offer(event.request_id, event.input_id)
        elif isinstance(event, Failed):
            self.failures[event.request_id] = event
        elif isinstance(event, Tokens):
            got = self.tokens.setdefault((event.request_id, event.index), [])
            assert event.offset == len(got) or self.jobs[event.request_id].resumed
            got.extend(event.token_ids)
            if event.finish_reason is not None:
                self.ends[event.request_id, event.index] = event

    def finish(self) -> Generated:
        """Step until nothing is left. Everything has been offered and sent: an engine that sees no work would hang."""
        self.step_while(self._is_unfinished)
        return self.tokens

    def _is_unfinished(self) -> bool:
        assert self.engine.is_empty() or self.engine.has_work(), self.engine.stats()
        return self.engine.has_work()

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def num_cached_inputs(self) -> int:
        return sum(isinstance(event, Grant) and event.status == "cached" for event in self.events)


def run(engine: DecoderEngine, jobs: ListOf[Job], **options: Any) -> Driver:
    """All jobs at once, to their end."""
    driver = Driver(engine, **options)
    for job in jobs:
        driver.add(job)
    driver.finish()
    return driver


def make_offer(key: tuple[str, int, int], rows: int, width: int, layout: InputLayout, content: str) -> Offer:
    """The offer (request id, input id, attempt) of an encoder output in float32."""
    return Offer(*key, content, "image", [rows, width], "float32", rows * width * 4, layout, "e0", FAR_S)


class KvWatch:
    """Remembers the keys and values of every sequence as they were computed, and looks whether they still are so.

    Swapping, sharing and copying must keep every bit. Only what is computed again may come out a little different.
    """

    def __init__(self, engine: DecoderEngine) -> None:
        self._engine = engine
        self._known: dict[int, torch.Tensor] = {}
        rewind = engine.scheduler._rewind_inputs

        def forget_and_rewind(request: Request) -> None:
            for sequence_id in request.sequence_ids:
                self._known.pop(sequence_id, None)
            rewind(request)

        engine.scheduler._rewind_inputs = forget_and_rewind  # type: ignore[method-assign]

    def look(self) -> None:
        """Call it between steps. Moves that are due come before the next forward pass: they are looked at then."""
        blocks = self._engine.blocks
        if blocks._moves:
            return
        for request in self._engine.state.requests.values():
            for sequence in request.sequences:
                if sequence.sequence_id in blocks.tables:
                    self._compare(sequence)

    def _compare(self, sequence: Sequence) -> None:
        table = torch.tensor(self._engine.blocks.tables[sequence.sequence_id], dtype=torch.long)
        now = torch.stack([cache[:, table].flatten(1, 2) for cache in self._engine.runner.caches])
        now = now[:, :, : sequence.num_computed_tokens]
        before = self._known.get(sequence.sequence_id)
        if before is not None:
            assert torch.equal(now[:, :, : before.shape[2]], before), f"{sequence.request.request_id} has changed"
        self._known[sequence.sequence_id] = now.clone()
