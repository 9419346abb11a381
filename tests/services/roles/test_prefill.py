"""The prefill worker against a scripted decode worker: what it offers and sends, and that every end leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from common.errors import ErrorInfo
from common.messages import KV_INPUT_ID, Abort, Encode, Encoded, Generate, KvOffer, Prefilled, Receipt, Withdraw
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event
from services.process.engine_thread import EngineThread
from services.roles.prefill import PrefillService
from tests.deadlines import timeless
from tests.eventually import eventually
from tests.services.apart import HELD_BY_ENGINES, question
from tests.services.inprocess import InProcess, Peer, in_process

PROMPT = question("Which colours does the sign have? " * 10)
CHUNK = 32


@dataclass
class Setting:
    worker: InProcess[PrefillService]
    peer: Peer

    async def prefill(self, request_id: str, *, attempt: int = 0, to: str = "peer", **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
        self.worker.proxy.send(Generate(request_id, PROMPT, [], params, prefill_for=to, attempt=attempt))

    async def offer(self, request_id: str, count: int = 1) -> KvOffer:
        offer = await self.peer.message(KvOffer, request_id, count)
        assert isinstance(offer, KvOffer)
        return offer

    async def take_part(self, status: str = "stored") -> tuple[int, int]:
        """Take the next part and say what has become of it; its first token and the one after its last."""
        received = await self.peer.tensor()
        header = received.header
        assert received.fault is None
        receipt = Receipt(header.request_id, header.input_id, header.attempt, status, part=header.part)  # type: ignore[arg-type]
        self.peer.send("injected", receipt)
        return header.first, header.first + header.shape[0]

    async def take_all(self, first: int, last: int) -> list[tuple[int, int]]:
        """Take parts until token `last`."""
        parts = [(first, first)]
        while parts[-1][1] < last:
            parts.append(await self.take_part())
            assert parts[-1][0] == parts[-2][1]
        return parts[1:]

    async def prefilled(self, request_id: str) -> Prefilled:
        return await self.worker.one(Prefilled, request_id)

    async def is_idle(self) -> bool:
        stats = await self.worker.role.thread.call(lambda engine: engine.stats(), 5.0)
        gauges = ("requests_outstanding", "prefills_open", "handoffs_open")
        return not any(stats[name] for name in HELD_BY_ENGINES) and not any(map(self.worker.gauge, gauges))


@pytest.fixture
async def setting(broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context) -> AsyncIterator[Setting]:
    async with (
        in_process(broker_url, redis, zmq_context, PrefillService, engine={"max_num_batched_tokens": CHUNK}) as worker,
        Peer(redis, zmq_context, await worker.record(), "decode").alive() as peer,
    ):
        setting = Setting(worker, peer)
        yield setting
        await eventually(setting.is_idle)
        assert worker.gauge("integrity_failures") == 0
    assert await redis.keys("*") == []


async def test_parts_leave_while_later_chunks_are_computed(setting: Setting) -> None:
    first_part_is_here = _hold_after_the_first_chunk(setting.worker.role.thread)
    await setting.prefill("r")
    offer = await setting.offer("r")
    assert (offer.num_tokens, offer.sender, offer.input_id) == (len(PROMPT) - 1, "w0", KV_INPUT_ID)
    setting.peer.grant(offer)
    first = await setting.take_part()
    assert first[1] < offer.num_tokens, "the rest has not even been computed"
    first_part_is_here.set()
    await setting.take_all(first[1], offer.num_tokens)
    assert setting.worker.gauge("kv_parts_sent_while_prefilling_total") >= 1
    ended = await setting.prefilled("r")
    assert ended.error is None
    assert {"queue", "prefill", "grant"} <= {span.stage for span in ended.spans}
    assert setting.worker.tally("kv_handoffs") == {"stored": 1}


def _hold_after_the_first_chunk(thread: EngineThread[DecoderEngine, Event]) -> threading.Event:
    """The engine goes no further with a prompt that it has begun, but still does what it is told, until this is set."""
    go_on, step = threading.Event(), thread._step

    def held(engine: DecoderEngine) -> list[Event]:
        begun = any(request.sequences[0].num_computed_tokens for request in engine.scheduler.running)
        return [] if begun and not go_on.wait(0.005) else step(engine)

    thread._step = held
    return go_on


async def test_only_what_the_receiver_lacks_is_sent(setting: Setting) -> None:
    await setting.prefill("some")
    offer = await setting.offer("some")
    setting.peer.grant(offer, first_token=offer.num_tokens - 1)
    assert await setting.take_part() == (offer.num_tokens - 1, offer.num_tokens)
    assert (await setting.prefilled("some")).error is None
    await setting.prefill("none")
    setting.peer.grant(await setting.offer("none"), status="cached")
    assert (await setting.prefilled("none")).error is None


async def test_log_probabilities_of_the_prompt_travel_with_the_last_word(setting: Setting) -> None:
    await setting.prefill("r", prompt_logprobs=0)
    setting.peer.grant(await setting.offer("r"), status="cached")
    ended = await setting.prefilled("r")
    assert len(ended.prompt_logprobs) == len(PROMPT)
    assert ended.prompt_logprobs[0] is None


async def test_a_part_that_came_corrupt_comes_again(setting: Setting) -> None:
    await setting.prefill("r")
    offer = await setting.offer("r")
    setting.peer.grant(offer, first_token=offer.num_tokens - 1)
    first = await setting.take_part("corrupt")
    assert await setting.take_part() == first
    assert (await setting.prefilled("r")).error is None
    assert setting.worker.tally("kv_handoffs")["sent_again"] == 1


async def test_a_refusal_reaches_the_proxy_in_the_receivers_words(setting: Setting) -> None:
    error = ErrorInfo("item_too_large", "needs 9 blocks, the whole pool has 8")
    await setting.prefill("r")
    setting.peer.grant(await setting.offer("r"), status="refused", error=error)
    assert (await setting.prefilled("r")).error == error


@pytest.mark.parametrize("stage", ["offer", "part"])
async def test_a_receiver_that_vanishes_costs_a_retryable_error(
    setting: Setting, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.cluster.registry.ABSENCE_S", 0.5)
    await setting.prefill("r")
    offer = await setting.offer("r")
    if stage == "part":
        setting.peer.grant(offer)
        await setting.peer.tensor()
    await setting.peer.vanish()
    error = (await setting.prefilled("r")).error
    assert error is not None
    assert error.retryable


async def test_what_is_not_wanted_any_more_is_withdrawn(setting: Setting) -> None:
    await setting.prefill("aborted")
    await setting.offer("aborted")
    setting.worker.proxy.send(Abort("aborted"))
    assert await setting.peer.message(Withdraw, "aborted") == Withdraw("aborted", KV_INPUT_ID, 0, "w0")
    await setting.prefill("done")
    setting.peer.grant(await setting.offer("done"), status="cached")
    assert (await setting.prefilled("done")).error is None
    assert setting.peer.of(Withdraw, "done") == []


async def test_a_receiver_that_is_not_there_is_unavailable(setting: Setting) -> None:
    await setting.prefill("r", to="nobody")
    error = (await setting.prefilled("r")).error
    assert error is not None
    assert error.code == "unavailable"


@pytest.mark.parametrize("stage", ["offer", "part"])
async def test_an_abort_ends_it_without_a_word(setting: Setting, stage: str) -> None:
    await setting.prefill("r")
    offer = await setting.offer("r")
    if stage == "part":
        setting.peer.grant(offer)
        await setting.peer.tensor()
    setting.worker.proxy.send(Abort("r"))
    await eventually(setting.is_idle, 2.0)
    assert setting.worker.answers == []


async def test_a_newer_attempt_replaces_an_older_one_and_a_repeated_one_is_ignored(setting: Setting) -> None:
    await setting.prefill("r", attempt=0)
    old = await setting.offer("r")
    await setting.prefill("r", attempt=1)
    new = await setting.offer("r", count=2)
    assert (old.attempt, new.attempt) == (0, 1)
    await setting.prefill("r", attempt=1)
    await eventually(lambda: setting.worker.tally("handoffs") == {"duplicate_request": 1})
    setting.peer.grant(old)
    setting.peer.grant(new, status="cached")
    assert (await setting.prefilled("r")).attempt == 1
    assert len(setting.worker.answers) == 1
    assert setting.worker.tally("handoffs") == {"duplicate_request": 1}


async def test_an_offer_that_the_broker_has_forgotten_is_made_again(
    setting: Setting, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.1)
    await setting.prefill("r")
    offer = await setting.offer("r")
    await redis.flushall()
    assert timeless(await setting.offer("r", count=2)) == timeless(offer)
    setting.peer.grant(offer, first_token=offer.num_tokens - 1)
    header = (await setting.peer.tensor()).header
    await redis.flushall()  # and with it, for all that the sender knows, the receipt
    await setting.peer.message(KvOffer, "r", len(setting.peer.of(KvOffer, "r")) + 1)
    setting.peer.grant(offer)  # not here yet
    assert (await setting.peer.tensor()).header == header
    setting.peer.grant(offer, status="cached")
    await setting.peer.message(KvOffer, "r", len(setting.peer.of(KvOffer, "r")) + 1)
    setting.peer.grant(offer, status="cached")
    assert (await setting.prefilled("r")).error is None


async def test_what_a_prefill_worker_does_not_do_is_said(setting: Setting) -> None:
    params = SamplingParams()
    setting.worker.proxy.send(Generate("whole", PROMPT, [], params))
    setting.worker.proxy.send(Generate("decode", PROMPT, [], params, prefilled=True))
    for request_id in ("whole", "decode"):
        error = (await setting.prefilled(request_id)).error
        assert error is not None
        assert error.message.startswith("w0 is a prefill worker: a request has to name the decode worker")
    setting.worker.proxy.send(Encode("item", 0, 0, "image", "hash", b"", "w0", 0.0))
    refused = await setting.worker.one(Encoded, "item")
    assert refused.error is not None
    assert "has no encoder" in refused.error.message


async def test_a_request_that_the_engine_refuses_is_told_as_a_prefill(setting: Setting) -> None:
    setting.worker.proxy.send(Generate("r", [10**6], [], SamplingParams(), prefill_for="peer"))
    ended = await setting.prefilled("r")
    assert ended.error is not None
    assert ended.error.code == "invalid_request"
