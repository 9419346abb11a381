"""Handing over keys and values while an engine computes them, whatever it does meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from broker.handoff.channels import Delivery
from broker.handoff.sender import HandoffSender, key_of
from common.config import Settings
from common.errors import ErrorInfo
from common.messages import (
    KV_INPUT_ID,
    Failed,
    Generate,
    Grant,
    HandoffMessage,
    InstanceRecord,
    KvOffer,
    Prefilled,
    Receipt,
    TensorHeader,
)
from common.sampling_params import SamplingParams
from engine.device.pending_tensor import PendingTensor
from engine.state.events import KvComputed, KvReady
from services.handoff.kv_sender import PART_BYTES, KvSender, tokens_per_part
from services.worker_context import WorkerContext
from tests.broker.conftest import make_record
from tests.eventually import eventually

NUM_TOKENS, NUM_ROWS = 40, 6
SHAPE = (2, 2, 1, 4)
OFFER = KvOffer("r", 0, NUM_TOKENS, NUM_ROWS, list(SHAPE), list(SHAPE), "float32", [], 1, 0, "", 0.0)


@dataclass
class FakeEngine:
    """Has the keys and values of `num_computed` tokens; each holds its own number."""

    num_computed: int = 0
    calls: list[str] = field(default_factory=list)

    def export_kv(self, request_id: str, table: str, first: int, last: int) -> PendingTensor | None:
        if table == "self" and last > self.num_computed:
            self.calls.append("nothing there")
            return None
        numbers = torch.arange(first, last, dtype=torch.float32).view(-1, 1, 1, 1, 1)
        return PendingTensor(numbers.expand(-1, *SHAPE).contiguous())

    def grant_kv(self, request_id: str) -> None:
        self.calls.append("grant")

    def end_prefill(self, request_id: str) -> None:
        self.calls.append("end")

    def abort(self, request_id: str) -> None:
        self.calls.append("abort")


class FakeThread:
    """Runs commands at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def submit(self, command: Callable[[FakeEngine], None]) -> None:
        command(self.engine)

    async def call(self, function: Callable[[FakeEngine], Any], timeout_s: float) -> Any:
        return function(self.engine)


@dataclass
class FakeTensors:
    """Notes what is sent."""

    sent: list[tuple[TensorHeader, list[float]]] = field(default_factory=list)

    async def send(self, receiver: InstanceRecord, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.float32).view(header.shape)
        self.sent.append((header, values[:, 0, 0, 0, 0].tolist()))


@dataclass
class FakeContext:
    """What a sender needs of its worker."""

    instance_id: str = "p0"
    epoch: int = 1
    cuda: object | None = None
    settings: Settings = field(default_factory=lambda: Settings(handoff_timeout_s=5.0, request_timeout_s=20.0))
    replies: list[Prefilled] = field(default_factory=list)
    offers: list[KvOffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channels = self.metrics = self.hops = self

    def send(self, instance_id: str, channel: str, message: KvOffer) -> None:
        self.offers.append(message)

    async def find_instance(self, instance_id: str, seen: object) -> InstanceRecord:
        return make_record(instance_id, "decode", tensor_address="tcp://127.0.0.1:1")

    def reply(self, request_id: str, message: Prefilled) -> None:
        self.replies.append(message)

    def mark_sent(self, *_: object) -> None: ...

    def observe_spans(self, *_: object) -> None: ...


class Setting:
    """One request `r` at a sender, and the receiver's answers."""

    def __init__(self) -> None:
        self.engine, self.tensors, self.context = FakeEngine(), FakeTensors(), FakeContext()
        self.handoffs = HandoffSender(
            cast(Any, self.context), cast(Any, self.tensors), self.context.settings.handoff_timeout_s
        )
        self.handoffs.own = make_record("p0", "prefill")
        thread = cast(Any, FakeThread(self.engine))
        self.sender = KvSender(cast(WorkerContext, self.context), thread, self.handoffs)

    def answer(self, message: HandoffMessage) -> None:
        self.handoffs.handle(Delivery(b"stream", b"1-0", message, False))

    async def granted(self, **changes: Any) -> None:
        """A request whose offer has been granted."""
        self.sender.begin(Generate("r", [1] * (NUM_TOKENS + 1), [], SamplingParams(), prefill_for="d0"))
        self.sender.handle(KvReady("r", OFFER))
        await eventually(lambda: len(self.context.offers) > 0)
        self.answer(Grant(*key_of(self.context.offers[0]), "granted", **changes))

    def compute(self, num_tokens: int) -> None:
        self.engine.num_computed = num_tokens
        self.sender.handle(KvComputed("r", num_tokens))

    async def store(self, count: int) -> list[float]:
        """Confirm part number `count`, and return its values."""
        await eventually(lambda: len(self.tensors.sent) > count)
        header, values = self.tensors.sent[count]
        self.answer(Receipt("r", KV_INPUT_ID, 0, "stored", header.part))
        return values

    async def finish(self) -> Prefilled:
        await eventually(lambda: "end" in self.engine.calls)
        self.sender.handle(Prefilled("r", 0))
        await eventually(lambda: bool(self.context.replies))
        return self.context.replies[0]


@asynccontextmanager
async def setting() -> AsyncIterator[Setting]:
    one = Setting()
    yield one
    await eventually(lambda: one.sender.num_open == one.handoffs.num_open == 0)
    one.sender.close()


async def test_each_part_is_sent_as_soon_as_it_is_computed_and_the_one_before_is_stored() -> None:
    async with setting() as one:
        await one.granted()
        await asyncio.sleep(0)
        assert one.tensors.sent == []
        one.compute(10)
        assert await one.store(0) == list(range(NUM_ROWS))  # all of cross-attention first
        assert await one.store(1) == list(range(10))
        one.compute(25)
        await eventually(lambda: len(one.tensors.sent) == 3)
        one.compute(NUM_TOKENS)
        assert await one.store(2) == list(range(10, 25))
        assert await one.store(3) == list(range(25, NUM_TOKENS))
        ended = await one.finish()
        assert (ended.error, one.sender.num_open, one.engine.calls) == (None, 0, ["grant", "end"])
        assert [(header.table, header.part, header.first) for header, _ in one.tensors.sent] == [
            ("cross", 0, 0),
            ("self", 1, 0),
            ("self", 2, 10),
            ("self", 3, 25),
        ]


async def test_what_the_receiver_has_is_not_sent() -> None:
    async with setting() as one:
        await one.granted(first_token=38, cross_cached=True)
        one.compute(NUM_TOKENS)
        assert await one.store(0) == [38.0, 39.0]
        assert (await one.finish()).error is None


async def test_a_prefill_that_has_lost_its_blocks_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.handoff.kv_sender.RETRY_S", 0.02)
    async with setting() as one:
        await one.granted(cross_cached=True)
        one.compute(10)
        await eventually(lambda: len(one.tensors.sent) == 1)
        one.sender.handle(KvComputed("r", 20))
        one.engine.num_computed = 0  # preempted, between the report and the export
        await one.store(0)
        await eventually(lambda: "nothing there" in one.engine.calls)
        one.engine.num_computed = NUM_TOKENS  # swapped in: nothing is computed, so nothing is reported
        assert await one.store(1) == list(range(10, 20))
        one.compute(NUM_TOKENS)
        assert await one.store(2) == list(range(20, NUM_TOKENS))
        assert (await one.finish()).error is None


async def test_the_lease_is_kept_alive_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.handoff.kv_sender.RETRY_S", 0.02)
    async with setting() as one:
        one.handoffs._timeout_s = 0.3
        await one.granted(cross_cached=True)
        began_s = time.monotonic()
        await eventually(lambda: len(one.context.offers) >= 4)
        assert time.monotonic() - began_s >= 2 * 0.1
        one.sender.discard("r")


async def test_what_the_engine_has_given_up_before_it_was_offered_is_not_offered() -> None:
    async with setting() as one:
        one.sender.begin(Generate("r", [1] * (NUM_TOKENS + 1), [], SamplingParams(), prefill_for="d0"))
        one.sender.handle(KvReady("r", OFFER))
        one.sender.handle(Failed("r", ErrorInfo("internal_error", "the engine gave it up")))
        await eventually(lambda: bool(one.context.replies))
        assert one.context.replies[0].error == ErrorInfo("internal_error", "the engine gave it up")
        assert not one.context.offers


async def test_on_a_gpu_only_so_many_parts_wait_for_the_steps_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop waits for none of them."""
    steps_end, gathered = threading.Event(), list[int]()

    class Pending(PendingTensor):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            self.is_cuda = True

        def wait(self) -> torch.Tensor:
            steps_end.wait(20)
            return super().wait()

    def gather(request_id: str, table: str, first: int, last: int) -> PendingTensor:
        gathered.append(first)
        return Pending(torch.tensor([float(first)]))

    monkeypatch.setattr("services.handoff.kv_sender.MAX_PENDING", 2)
    engine, context = FakeEngine(), FakeContext(cuda=object())
    monkeypatch.setattr(engine, "export_kv", gather)
    sender = KvSender(cast(WorkerContext, context), cast(Any, FakeThread(engine)), cast(Any, None))
    prefill = cast(Any, SimpleNamespace(message=SimpleNamespace(request_id="r")))
    exports = [
        asyncio.create_task(sender._export(prefill, cast(Any, None), "self", number, number + 1)) for number in range(4)
    ]
    await eventually(lambda: len(gathered) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert gathered == [0, 1]
    steps_end.set()
    assert [tensor.tolist() for tensor in await asyncio.gather(*exports)] == [[0], [1], [2], [3]]
    assert gathered == [0, 1, 2, 3]


def test_parts_are_not_larger_than_their_limit_unless_a_token_is() -> None:
    token_bytes = 30 * 2 * 8 * 64 * 2
    assert tokens_per_part([30, 2, 8, 64], "bfloat16") == PART_BYTES // token_bytes
    assert tokens_per_part([30, 2, 8, 2**20], "bfloat16") == 1
    assert tokens_per_part([], "float32") == PART_BYTES // 4
