"""The decode worker against a scripted prefill worker: what it grants and refuses, and that every end frees all."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.handoff.sender import key_of
from common.errors import ErrorInfo
from common.messages import (
    KV_INPUT_ID,
    Abort,
    Failed,
    Generate,
    Grant,
    InputNeeded,
    KvOffer,
    Receipt,
    TensorHeader,
    Tokens,
)
from common.sampling_params import SamplingParams
from services.roles.decoder import DecodeService
from tests.eventually import eventually
from tests.services.apart import HELD_BY_ENGINES, question
from tests.services.inprocess import InProcess, Peer, in_process

PROMPT = question("Which colours does the sign have? " * 4)
NUM_TOKENS = len(PROMPT) - 1
LEASE_S = 2.0


@dataclass
class Setting:
    worker: InProcess[DecodeService]
    peer: Peer
    token_shape: list[int]

    async def generate(self, request_id: str, attempt: int = 0) -> None:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        self.worker.proxy.send(Generate(request_id, PROMPT, [], sampling, prefilled=True, attempt=attempt))

    def offer(self, request_id: str, **changes: Any) -> KvOffer:
        deadline_s = time.monotonic() + 20
        offer = KvOffer(request_id, 0, NUM_TOKENS, 0, self.token_shape, [], "float32", [], 1, 0, "peer", deadline_s)
        return msgspec.structs.replace(offer, **changes)

    async def granted(self, request_id: str) -> KvOffer:
        """A request whose keys and values may be sent."""
        offer = self.offer(request_id)
        await self.generate(request_id)
        self.peer.send("metadata", offer)
        grant = await self.peer.message(Grant, request_id)
        assert (grant.status, grant.first_token) == ("granted", 0)
        return offer

    async def send(self, offer: KvOffer, number: int, begin: int, end: int, **changes: Any) -> None:
        """Send part `number`: the tokens from `begin` to `end` (not included), all zeros."""
        record = await self.worker.record()
        shape, size_bytes = [end - begin, *self.token_shape], (end - begin) * self.token_bytes
        header = TensorHeader(
            *key_of(offer), "peer", record.epoch, shape, "float32", size_bytes, 0, number, "self", begin
        )
        header = msgspec.structs.replace(header, **changes)
        await self.peer.tensors.send(record, header, memoryview(bytes(size_bytes)), 5.0)

    @property
    def token_bytes(self) -> int:
        layers, two, heads, width = self.token_shape
        return 4 * layers * two * heads * width

    async def receipt(self, request_id: str, count: int = 1) -> tuple[int, str]:
        receipt = await self.peer.message(Receipt, request_id, count)
        return receipt.part, receipt.status

    async def done(self, request_id: str) -> list[Tokens]:
        await eventually(lambda: any(message.done for message in self.worker.of(Tokens, request_id)), 20.0)
        return self.worker.of(Tokens, request_id)

    async def stats(self) -> dict[str, float]:
        return dict(await self.worker.role.thread.call(lambda engine: engine.stats(), 5.0))

    async def lease_until_s(self) -> float:
        lease_s = await self.worker.role.thread.call(lambda engine: engine.next_deadline_s(), 5.0)
        assert lease_s is not None
        return lease_s

    async def is_idle(self) -> bool:
        stats = await self.stats()
        return not any(stats[name] for name in HELD_BY_ENGINES) and not self.worker.gauge("requests_outstanding")


@asynccontextmanager
async def beside_a_prefill_worker(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, **settings: float
) -> AsyncIterator[Setting]:
    async with (
        in_process(broker_url, redis, zmq_context, DecodeService, **settings) as worker,
        Peer(redis, zmq_context, await worker.record(), "prefill").alive() as peer,
    ):
        shape = await worker.role.thread.call(lambda engine: list(engine.kv_receiver.offer_check.token_shape), 5.0)
        yield Setting(worker, peer, shape)


@pytest.fixture
async def setting(broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context) -> AsyncIterator[Setting]:
    async with beside_a_prefill_worker(broker_url, redis, zmq_context, handoff_timeout_s=LEASE_S) as setting:
        yield setting
        await eventually(setting.is_idle)
        await eventually(lambda: setting.worker.role._receiver._offers == {})  # the loop hears of it after the engine
        assert setting.worker.gauge("integrity_failures") == 0
    assert await redis.keys("*") == []


async def test_parts_in_any_order_and_repeated_ones_start_the_request_once_all_are_there(setting: Setting) -> None:
    offer = await setting.granted("r")
    half = NUM_TOKENS // 2
    await setting.send(offer, 1, half, NUM_TOKENS)
    await setting.send(offer, 1, half, NUM_TOKENS)
    assert await setting.receipt("r") == await setting.receipt("r", 2) == (1, "stored")
    assert setting.worker.of(Tokens, "r") == []
    await setting.send(offer, 0, 0, half)
    assert await setting.receipt("r", 3) == (0, "stored")
    messages = await setting.done("r")
    assert [message.offset for message in messages] == [0, 1, 2, 3]
    stats = await setting.stats()
    assert stats["prefill_handoff_tokens_total"] == NUM_TOKENS
    assert stats["recomputed_tokens_total"] == 0


async def test_a_part_that_is_damaged_or_not_what_was_granted_is_refused_and_may_come_again(setting: Setting) -> None:
    offer = await setting.granted("r")
    size_bytes, wrong_shape = NUM_TOKENS * setting.token_bytes, [*setting.token_shape[:-1], 1]
    for number, changes in enumerate(
        (
            {"size_bytes": size_bytes - 1},
            {"shape": [NUM_TOKENS, *wrong_shape]},
            {"dtype": "bfloat16"},
            {"first": NUM_TOKENS},
            {"table": ""},
            {"table": "cross"},
        )
    ):
        await setting.send(offer, 0, 0, NUM_TOKENS, **changes)
        assert await setting.receipt("r", number + 1) == (0, "corrupt")
    assert (await setting.stats())["prefill_handoff_tokens_total"] == 0
    await setting.send(offer, 0, 0, NUM_TOKENS)
    await setting.done("r")


async def test_a_part_that_torch_cannot_make_is_refused_for_a_request_that_is_not_here(setting: Setting) -> None:
    offer = setting.offer("r", dtype="uint8", token_shape=[setting.token_bytes])
    setting.peer.send("metadata", offer)
    await eventually(lambda: key_of(offer) in setting.worker.role._receiver._offers)
    await setting.send(offer, 0, 0, NUM_TOKENS, dtype="uint8", shape=[NUM_TOKENS, setting.token_bytes])
    assert await setting.receipt("r") == (0, "corrupt")
    await setting.send(offer, 0, 0, 0, shape=[0, 2**61, 2**61])
    assert await setting.receipt("r", 2) == (0, "corrupt")
    await setting.granted("another")
    setting.worker.proxy.send(Abort("another"))


async def test_a_part_for_a_former_process_is_cancelled_and_one_from_an_impostor_ignored(setting: Setting) -> None:
    offer = await setting.granted("r")
    await setting.send(offer, 0, 0, NUM_TOKENS, receiver_epoch=1)
    assert await setting.receipt("r") == (0, "cancelled")
    await setting.send(offer, 0, 0, NUM_TOKENS, sender="impostor")
    await eventually(lambda: setting.worker.tally("handoffs").get("stray") == 1)
    await setting.send(offer, 0, 0, NUM_TOKENS)
    await setting.done("r")


@pytest.mark.parametrize("parts", [0, 1])
async def test_a_sender_that_vanishes_costs_the_lease_and_the_next_attempt_is_welcome(
    setting: Setting, parts: int
) -> None:
    offer = await setting.granted("r")
    if parts:
        await setting.send(offer, 0, 0, 5)
    await eventually(lambda: setting.worker.of(InputNeeded, "r") == [InputNeeded("r", KV_INPUT_ID)], 2 * LEASE_S)
    stats = await setting.stats()
    assert stats["kv_blocks_used"] == stats["kv_reserved_requests"] == 0
    await setting.send(offer, 1, 5, NUM_TOKENS)  # too late
    assert (await setting.receipt("r", parts + 1))[1] in ("expired", "cancelled")
    again = setting.offer("r", attempt=1)
    setting.peer.send("metadata", again)
    await eventually(lambda: setting.peer.of(Grant, "r")[-1].status == "granted")
    await setting.send(again, 0, 0, NUM_TOKENS)
    await setting.done("r")


async def test_signs_of_life_prolong_a_lease(setting: Setting) -> None:
    offer = await setting.granted("r")
    before_s = await setting.lease_until_s()
    setting.peer.send("metadata", offer)
    again: Grant = await setting.peer.message(Grant, "r", 2)
    assert again.num_parts == 0
    assert await setting.lease_until_s() > before_s
    setting.worker.proxy.send(Abort("r"))


async def test_the_answer_to_a_repeated_offer_says_how_many_parts_are_here(setting: Setting) -> None:
    offer = await setting.granted("r")
    half = NUM_TOKENS // 2
    await setting.send(offer, 0, 0, half)
    assert await setting.receipt("r") == (0, "stored")
    setting.peer.send("metadata", offer)
    again: Grant = await setting.peer.message(Grant, "r", 2)
    assert (again.status, again.first_token, again.num_parts) == ("granted", 0, 1)
    await setting.send(offer, 1, half, NUM_TOKENS)
    await setting.done("r")


@pytest.mark.parametrize("stage", ["offered", "granted", "started"])
async def test_an_abort_tells_the_sender_and_frees_everything(setting: Setting, stage: str) -> None:
    if stage == "offered":
        setting.peer.send("metadata", setting.offer("r"))
        await eventually(lambda: setting.worker.gauge("offers_open") == 1)
    else:
        offer = await setting.granted("r")
    if stage == "started":
        await setting.send(offer, 0, 0, NUM_TOKENS)
        assert await setting.receipt("r") == (0, "stored")
    setting.worker.proxy.send(Abort("r"))
    await eventually(setting.is_idle, 2.0)
    if stage != "started":
        assert (await setting.peer.message(Grant, "r", 2 if stage == "granted" else 1)).status == "cancelled"


async def test_a_newer_attempt_replaces_an_older_one_and_its_last_words_are_not_told(setting: Setting) -> None:
    await setting.generate("r", attempt=1)
    await setting.generate("r", attempt=3)
    await setting.generate("r", attempt=2)
    await eventually(lambda: setting.worker.tally("handoffs") == {"duplicate_request": 1})
    error = ErrorInfo("internal_error", "of the older one")
    setting.worker.role._handle_events(
        [Tokens("r", 0, [5], "length", done=True, attempt=1), Failed("r", error, attempt=1)]
    )
    offer = setting.offer("r", attempt=3, request_attempt=3)
    setting.peer.send("metadata", offer)
    await setting.peer.message(Grant, "r")
    await setting.send(offer, 0, 0, NUM_TOKENS)
    assert {message.attempt for message in await setting.done("r")} == {3}
    assert setting.worker.of(Failed, "r") == []


async def test_what_does_not_fit_the_request_or_itself_is_refused(setting: Setting) -> None:
    await setting.generate("r")
    for number, changes in enumerate(({"num_tokens": NUM_TOKENS + 1}, {"dtype": "complex128"}, {"cross_shape": [1]})):
        setting.peer.send("metadata", setting.offer("r", attempt=number, **changes))
        grant = await setting.peer.message(Grant, "r", number + 1)
        assert (grant.status, grant.error.code) == ("refused", "internal_error"), "no fault of the client's"
    setting.worker.proxy.send(Abort("r"))
