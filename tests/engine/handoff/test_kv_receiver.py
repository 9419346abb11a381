"""The receiver's half of the handoff of keys and values, whatever comes in whatever order: a model of random runs.

No network and no decoder: the paged cache is a small tensor, and each request's keys and values follow from its name.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import cast
from unittest import mock

import hypothesis.strategies as st
import msgspec
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config import EngineConfig
from common.messages import Grant, InputLayout, InputSlot, KvOffer, Receipt
from common.sampling_params import SamplingParams
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool
from engine.cache.encoder_cache import EncoderCacheManager
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.kv_receiver import KvHandoffState, KvReceiver
from engine.handoff.offer_check import KvOfferCheck, KvPart, OfferCheck
from engine.runner.decoder import DecoderRunner
from engine.runner.moves import read_tokens, write_tokens
from engine.scheduler.capacity import CacheLookup
from engine.scheduler.decoder import DecoderScheduler
from engine.state.engine_state import EngineState
from engine.state.inputs import InputBuffers
from engine.state.request import Request, RequestInput
from engine.state.spec import Table

BLOCK_SIZE = 4
NUM_BLOCKS = 14
MAX_SEQS = 3
SHAPE = (2, 2, 1, 3)
LEASE_S = 10.0
FAR_S = 1e12
NAMES = [f"r{number}" for number in range(6)]
CLIPS = [("", 0), ("clip a", 5), ("clip b", 9)]
"""Contents and rows of what cross-attention reads; the first one stands for a model without."""


def values(name: str, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(num_tokens, *SHAPE, generator=generator)


class ReceiverMachine(RuleBasedStateMachine):
    """One intake, six possible requests; time passes only by a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        self.clocks = [mock.patch(f"engine.handoff.{name}.time", clock) for name in ("kv_receiver", "early_offers")]
        for patched in self.clocks:
            patched.start()
        self.caches = [torch.zeros(2, NUM_BLOCKS + 1, BLOCK_SIZE, *SHAPE[2:]) for _ in range(SHAPE[0])]
        self.blocks = BlockManager(BlockPool(NUM_BLOCKS + 1), BLOCK_SIZE)
        cache_lookup = CacheLookup(self.blocks, enabled=True)
        inputs = OfferCheck(4, 100, 20, None, cross_attention=True)
        state = EngineState()
        self.inputs = InputReceiver(state, EncoderCacheManager(1000), inputs, cache_lookup, LEASE_S)
        config = EngineConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=100)
        self.scheduler = DecoderScheduler(self.blocks, cache_lookup, InputBuffers(MAX_SEQS, 100, 4), config, 100)
        self.events = state.outbox
        check = KvOfferCheck(inputs, SHAPE, SHAPE, "float32")
        runner = cast(DecoderRunner, SimpleNamespace(move=lambda _: None, write_tokens=self._write))
        self.intake = KvReceiver(state, self.scheduler, self.inputs, check, runner, LEASE_S)
        self.live: dict[str, Request] = {}
        self.attempts: dict[str, int] = {}
        self.ended: set[str] = set()
        self.num_arrived = 0

    def _write(self, table: Table, block_table: list[int], first: int, tokens: torch.Tensor) -> None:
        written = block_table[first // BLOCK_SIZE : -(-(first + len(tokens)) // BLOCK_SIZE)]
        assert all(self.blocks.pool.references(block) == 1 for block in written), "others read these"
        assert not set(written) & set(self.blocks._hash_of), "others may find these"
        write_tokens(self.caches, block_table, first, tokens)

    # --- what may happen

    @rule(name=st.sampled_from(NAMES), length=st.integers(1, 18), clip=st.sampled_from(CLIPS), prefix=st.booleans())
    def arrive(self, name: str, length: int, clip: tuple[str, int], prefix: bool) -> None:
        if name in self.live or name in self.ended:
            return
        content, rows = clip
        # Half of them begin alike: what one of them leaves in the prefix cache, the next one finds.
        first = 1 if prefix else 2 + zlib.crc32(name.encode()) % 90
        inputs = [RequestInput(InputSlot(0, "audio", content))] if rows else []
        self.num_arrived += 1
        request = Request(
            name,
            [first] * length,
            inputs,
            sampling=SamplingParams(),
            arrival=self.num_arrived,
            is_encoder_decoder=True,
            cross_attention=bool(rows),
            prefilled=True,
        )
        self.live[name] = request
        self.inputs.add_request(request)
        self.intake.add_request(request)
        self.attempts[name] = -1

    def described(self, request: Request) -> KvOffer:
        rows = next((rows for content, rows in CLIPS if request.inputs and content == self._content(request)), 0)
        layouts = [InputLayout(rows, [])] if rows else []
        sizes = len(request.prompt) - 1, rows, list(SHAPE), list(SHAPE), "float32"
        return KvOffer(request.request_id, 0, *sizes, layouts, seed=0, num_cached_tokens=0, sender="", deadline_s=FAR_S)

    def _content(self, request: Request) -> str:
        return request.inputs[0].slot.content_hash

    @precondition(lambda self: self.live)
    @rule(data=st.data(), newer=st.booleans(), soon=st.booleans())
    def offer(self, data: st.DataObject, newer: bool, soon: bool) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self._offer(request, newer=newer, deadline_s=self.now_s + 5.0 if soon else FAR_S)

    def _offer(self, request: Request, *, newer: bool, deadline_s: float = FAR_S) -> None:
        name = request.request_id
        attempt = self.attempts[name] + (newer or self.attempts[name] < 0)
        if self.intake._handoffs[name].state is not KvHandoffState.STARTED:  # that has all it wants of an earlier one
            self.attempts[name] = attempt
        changes = {"attempt": attempt, "deadline_s": deadline_s}
        self.intake.offer(msgspec.structs.replace(self.described(request), **changes))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), old=st.booleans())
    def deliver(self, data: st.DataObject, old: bool) -> None:
        """Any part of what a handoff has: wanted or not, of this attempt or the one before."""
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        offer = self.described(request)
        tables: list[tuple[Table, int]] = [("self", offer.num_tokens), ("cross", offer.num_encoder_tokens)]
        table, size = data.draw(st.sampled_from(tables))
        first = data.draw(st.sampled_from([0, size // 2]) | st.integers(0, size))
        last = data.draw(st.just(size) | st.integers(first, size))
        self._send(request, table, first, last, self.attempts[request.request_id] - old)
        if old:
            assert isinstance(self.events[-1], Receipt)
            assert self.events[-1].status != "stored"

    def _send(self, request: Request, table: Table, first: int, last: int, attempt: int) -> None:
        tokens = self._truth(request, table)[first:last]
        part = KvPart(0, table, first, tokens.clone())
        self.intake.deliver(request.request_id, attempt, part)

    def _truth(self, request: Request, table: Table) -> torch.Tensor:
        """Keys and values follow from the tokens before them and from what cross-attention reads."""
        content = self._content(request) if request.inputs else ""
        if table == "cross":
            return values(content, 9)[: self.described(request).num_encoder_tokens]
        return values(f"{request.prompt[0]} {content}", 18)[: len(request.prompt) - 1]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), old=st.booleans())
    def withdraw(self, data: st.DataObject, old: bool) -> None:
        """A sender gives up, perhaps long ago: it costs what this attempt has, and nothing else."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        before = self.intake._handoffs[name].state
        self.intake.withdraw(name, self.attempts[name] - old)
        waits = not old and before in (KvHandoffState.OFFERED, KvHandoffState.RESERVED)
        assert self.intake._handoffs[name].state is (KvHandoffState.WAITING if waits else before)

    @rule()
    def grant(self) -> None:
        self.intake.grant()

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.intake.expire(self.now_s)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """An abort, or the last token."""
        self._end(data.draw(st.sampled_from(sorted(self.live))))

    def _end(self, name: str) -> None:
        request = self.live.pop(name)
        self.intake.end_request(name, 0)
        self.scheduler.remove(request)
        self.inputs.end_request(request)
        self.ended.add(name)

    # --- what must hold

    @invariant()
    def the_books_add_up(self) -> None:
        self.blocks.check_integrity()
        self.intake.check_integrity()
        held = [*self.scheduler.running, *self.scheduler.reserved]
        assert sum(request.num_slots for request in held) <= MAX_SEQS
        assert all(request.sequences[0].sequence_id in self.blocks.tables for request in held)

    @invariant()
    def what_has_started_has_what_was_sent(self) -> None:
        for request in self.scheduler.running:
            name, sequence = request.request_id, request.sequences[0]
            assert self.intake._handoffs[name].state is KvHandoffState.STARTED
            assert sequence.num_computed_tokens == len(request.prompt) - 1
            own, cross = self.blocks.tables[sequence.sequence_id], self.blocks.get_cross_block_table(name)
            for table, blocks in (("self", own), ("cross", cross)):
                truth = self._truth(request, table)
                if len(truth):
                    assert torch.equal(read_tokens(self.caches, blocks, 0, len(truth)).wait(), truth)

    def teardown(self) -> None:
        """From here on nobody goes away and nothing is late: every request that has not ended gets its turn."""
        for _ in range(4 * len(NAMES)):
            self._send_what_is_wanted()
            self.the_books_add_up()
            self.what_has_started_has_what_was_sent()
            for request in list(self.scheduler.running):
                self._end(request.request_id)
        assert not self.live, f"these never got their turn: {sorted(self.live)}"
        self.intake.expire(2 * FAR_S)
        assert self.intake.is_empty()
        assert self.blocks.num_used == 0
        for patched in self.clocks:
            patched.stop()

    def _send_what_is_wanted(self) -> None:
        for name, request in self.live.items():
            if self.intake._handoffs[name].state is KvHandoffState.WAITING:
                self._offer(request, newer=True)
        self.events.clear()
        self.intake.grant()
        for request in list(self.scheduler.reserved):
            self._offer(request, newer=False)  # it is answered by what is wanted, once more
        for event in [one for one in self.events if isinstance(one, Grant) and one.status == "granted"]:
            request = self.live[event.request_id]
            offer = self.described(request)
            if not event.cross_cached:
                self._send(request, "cross", 0, offer.num_encoder_tokens, event.attempt)
            if event.first_token < offer.num_tokens:
                self._send(request, "self", event.first_token, offer.num_tokens, event.attempt)


ReceiverMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReceiver = ReceiverMachine.TestCase
