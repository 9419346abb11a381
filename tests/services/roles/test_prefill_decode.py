"""The prefill-decode worker against a scripted encoder: what it grants, what it refuses, what it ignores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from redis.asyncio import Redis
from structlog.testing import capture_logs

from broker.cluster import rpc
from broker.cluster.rpc import Outcome, WorkerServer, connection_id
from broker.handoff.channels import FIELD, GROUP, stream_key
from broker.transports.tensors import addresses_by_scheme
from broker.transports.zmq.wire import PIECE_BYTES, First
from common.errors import ErrorInfo
from common.hashing import content_hash
from common.messages import (
    Abort,
    Failed,
    Generate,
    Grant,
    Heartbeat,
    Offer,
    Receipt,
    Resumed,
    StopSequence,
    TensorHeader,
    Tokens,
    Withdraw,
    encode,
)
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor
from engine.processors import init_worker, process
from services.handoff.payloads import ALIGNMENT_BYTES, aligned
from services.process.request_owners import SILENCE_S
from services.roles.decoder import PrefillDecodeService
from tests.eventually import eventually
from tests.services.cluster import about_pictures, sign
from tests.services.inprocess import CLUSTER, InProcess, Peer, in_process
from tests.worker_client import worker_client


@dataclass
class Setting:
    worker: InProcess[PrefillDecodeService]
    peer: Peer

    def offer(self, request_id: str, **changes: Any) -> Offer:
        return msgspec.structs.replace(make_offer(request_id), **changes)

    async def generate(self, request_id: str, max_tokens: int = 4) -> Generate:
        message = about_pictures(request_id, [sign("red")], "What colour is the sign?", max_tokens)
        self.worker.proxy.send(message)
        return message

    async def granted(self, request_id: str) -> Offer:
        """A request with a granted input."""
        offer = self.offer(request_id)
        await self.generate(request_id)
        self.peer.send("metadata", offer)
        assert (await self.peer.message(Grant, request_id)).status == "granted"
        return offer

    async def deliver(self, offer: Offer, data: bytes = b"", **changes: Any) -> None:
        record = await self.worker.record()
        key = (offer.request_id, offer.input_id, offer.attempt)
        header = TensorHeader(*key, "peer", record.epoch, offer.shape, offer.dtype, offer.size_bytes)
        header = msgspec.structs.replace(header, **changes)
        await self.peer.tensors.send(record, header, memoryview(data or bytes(offer.size_bytes)), 5.0)

    async def receipt(self, request_id: str) -> str:
        return str((await self.peer.message(Receipt, request_id)).status)

    async def is_idle(self) -> bool:
        return await self.worker.role.thread.call(lambda engine: engine.is_empty(), 5.0)


def make_offer(request_id: str) -> Offer:
    init_worker("signpost", "float32")
    media = sign("red")
    item = process("image", media)
    digest, shape = content_hash("image", media), list(item.shape)
    deadline_s = time.monotonic() + 20
    return Offer(request_id, 0, 0, digest, "image", shape, item.dtype, item.size_bytes, item.layout, "peer", deadline_s)


@pytest.fixture
async def setting(broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context) -> AsyncIterator[Setting]:
    async with (
        in_process(broker_url, redis, zmq_context, PrefillDecodeService) as worker,
        Peer(redis, zmq_context, await worker.record(), "encoder").alive() as peer,
    ):
        setting = Setting(worker, peer)
        yield setting
        await eventually(setting.is_idle)
        assert worker.gauge("integrity_failures") == 0
        assert worker.gauge("requests_outstanding") == 0
    assert await redis.keys("*") == []


async def test_offer_grant_tensor_receipt_tokens(setting: Setting) -> None:
    offer = await setting.granted("r")
    await setting.deliver(offer)
    assert await setting.receipt("r") == "stored"
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))
    assert setting.worker.tally("handoffs") == {"granted": 1, "receipt_stored": 1}


async def test_a_debug_log_tells_the_walk_of_a_request(setting: Setting) -> None:
    with capture_logs() as logs:
        await test_offer_grant_tensor_receipt_tokens(setting)
    told = [entry.get("moment", entry["event"]) for entry in logs if entry.get("request") is not None]
    walk = ["offer_received", "granted", "tensor_received", "landed", "stored", "first token"]
    assert [step for step in told if step in walk] == walk
    assert {"request received", "prefill begun", "request ended"} <= set(told)


async def test_a_repeated_offer_gets_the_same_answer_and_a_repeated_request_none(setting: Setting) -> None:
    offer = await setting.granted("r")
    await setting.generate("r")
    setting.peer.send("metadata", offer)
    assert (await setting.peer.message(Grant, "r", count=2)).status == "granted"
    await setting.deliver(offer)
    await setting.deliver(offer)
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))
    offsets = [message.offset for message in setting.worker.of(Tokens, "r")]
    assert offsets == list(range(len(offsets)))
    assert setting.worker.tally("handoffs")["duplicate_request"] == 1


async def test_a_request_that_comes_again_on_another_connection_is_told_that_it_still_runs(
    setting: Setting, zmq_context: zmq.asyncio.Context
) -> None:
    message = await setting.generate("r")
    await eventually(lambda: setting.worker.gauge("requests_outstanding") == 1)
    address = (await setting.worker.record()).requests_address
    async with worker_client(zmq_context, address, "the same proxy, anew") as again, asyncio.timeout(10):
        again.send(message)
        failed = await again.receive()
    assert isinstance(failed, Failed)
    assert failed.error.code == "unavailable"
    setting.worker.proxy.send(Abort("r"))
    await eventually(lambda: setting.worker.gauge("requests_outstanding") == 0)
    assert setting.worker.answers == []


async def test_a_request_that_comes_again_on_a_newer_connection_of_its_proxy_starts_anew_there(
    setting: Setting, zmq_context: zmq.asyncio.Context
) -> None:
    message = msgspec.structs.replace(await setting.generate("r"), request_id="s")
    address = (await setting.worker.record()).requests_address
    async with (
        worker_client(zmq_context, address, connection_id("p0", 7, 1)) as older,
        worker_client(zmq_context, address, connection_id("p0", 7, 2)) as newer,
        asyncio.timeout(10),
    ):
        older.send(message)
        await eventually(lambda: setting.worker.gauge("requests_outstanding") == 2)
        newer.send(message)
        await eventually(lambda: setting.worker.tally("handoffs").get("taken_over") == 1)
        older.send(Abort("s"))  # too late: it is the newer one's now
        offer = setting.offer("s")
        setting.peer.send("metadata", offer)
        assert (await setting.peer.message(Grant, "s")).status == "granted"
        await setting.deliver(offer)
        tokens = await newer.receive()
    assert isinstance(tokens, Tokens)
    assert tokens.offset == 0
    setting.worker.proxy.send(Abort("r"))


async def test_a_proxy_that_dies_is_noticed_although_there_is_nothing_to_tell_it(
    setting: Setting, zmq_context: zmq.asyncio.Context
) -> None:
    message = msgspec.structs.replace(await setting.generate("r"), request_id="s")
    address = (await setting.worker.record()).requests_address
    async with worker_client(zmq_context, address, "mortal") as mortal:
        mortal.send(message)
        await eventually(lambda: setting.worker.gauge("requests_outstanding") == 2)
    await eventually(lambda: setting.worker.gauge("requests_outstanding") == 1, SILENCE_S / 2)
    setting.worker.proxy.send(Abort("r"))


async def test_offers_to_a_former_process_are_cancelled(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    stream = stream_key(CLUSTER, "w0", "metadata")
    await redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
    await redis.xadd(stream, {FIELD: encode(make_offer("taken"))})
    await redis.xreadgroup(GROUP, GROUP, {stream: ">"})
    await redis.xadd(stream, {FIELD: encode(make_offer("never seen"))})
    answers = stream_key(CLUSTER, "peer", "allocated")
    await redis.xgroup_create(answers, GROUP, id="0", mkstream=True)

    async def answered() -> bool:
        return int(await redis.xlen(answers)) == 2

    async with in_process(broker_url, redis, zmq_context, PrefillDecodeService) as worker:
        await eventually(answered)
        assert worker.tally("handoffs") == {"cancelled": 2}
        assert await redis.xlen(stream) == 0


async def test_a_tensor_for_a_former_process_or_for_nobody_is_cancelled(setting: Setting) -> None:
    offer = await setting.granted("r")
    await setting.deliver(offer, receiver_epoch=1)
    assert await setting.receipt("r") == "cancelled"
    await setting.deliver(setting.offer("nobody"))
    assert await setting.receipt("nobody") == "cancelled"
    setting.worker.proxy.send(Abort("r"))


async def test_a_tensor_from_somebody_else_changes_nothing(setting: Setting) -> None:
    offer = await setting.granted("r")
    await setting.deliver(offer, sender="impostor")
    await eventually(lambda: setting.worker.tally("handoffs").get("stray") == 1)
    await setting.deliver(offer)
    assert await setting.receipt("r") == "stored"
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))


async def test_a_tensor_that_is_not_what_was_offered_is_corrupt_and_the_next_attempt_welcome(setting: Setting) -> None:
    offer = await setting.granted("r")
    await setting.deliver(offer, b"far too short")
    assert await setting.receipt("r") == "corrupt"
    await setting.deliver(offer, bytes(offer.size_bytes // 2), dtype="bfloat16", size_bytes=offer.size_bytes // 2)
    assert (await setting.peer.message(Receipt, "r", count=2)).status == "corrupt"
    again = setting.offer("r", attempt=1)
    setting.peer.send("metadata", again)
    replaced = await setting.peer.message(Grant, "r", count=2)
    assert (replaced.attempt, replaced.status) == (0, "cancelled")
    granted = await setting.peer.message(Grant, "r", count=3)
    assert (granted.attempt, granted.status) == (1, "granted")
    await setting.deliver(again)
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))


async def test_of_several_tensors_for_one_input_that_of_the_granted_attempt_counts_and_once(setting: Setting) -> None:
    offer = await setting.granted("r")
    again = setting.offer("r", attempt=1)
    setting.peer.send("metadata", again)
    granted = await setting.peer.message(Grant, "r", count=3)
    assert (granted.attempt, granted.status) == (1, "granted")
    for number, (sent, status) in enumerate([(offer, "cancelled"), (again, "stored"), (again, "cancelled")], start=1):
        await setting.deliver(sent)
        receipt = await setting.peer.message(Receipt, "r", count=number)
        assert (receipt.attempt, receipt.status) == (sent.attempt, status)
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))
    assert setting.worker.of(Failed, "r") == []


async def test_a_tensor_damaged_on_its_way_is_never_in_the_cache_and_may_come_again(
    setting: Setting, zmq_context: zmq.asyncio.Context
) -> None:
    offer, record = await setting.granted("r"), await setting.worker.record()
    head = TensorHeader("r", 0, 0, "peer", record.epoch, offer.shape, offer.dtype, offer.size_bytes, checksum=1)
    with zmq_context.socket(zmq.DEALER) as socket:
        socket.connect(addresses_by_scheme(record.tensor_address)["tcp"])
        await socket.send_multipart([encode(head), bytes(offer.size_bytes)])
        assert await setting.receipt("r") == "corrupt"
    cache = await setting.worker.role.thread.call(lambda engine: engine.cache, 5.0)
    assert cache.is_reserved(offer.content_hash)
    assert not cache.is_ready(offer.content_hash)
    await setting.deliver(offer)
    assert (await setting.peer.message(Receipt, "r", count=2)).status == "stored"
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))


async def test_a_tensor_that_comes_after_its_grant_has_expired_leaves_nothing(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with (
        in_process(broker_url, redis, zmq_context, PrefillDecodeService, handoff_timeout_s=0.3) as worker,
        Peer(redis, zmq_context, await worker.record(), "encoder").alive() as peer,
    ):
        setting = Setting(worker, peer)
        offer = await setting.granted("r")
        assert (await peer.message(Grant, "r", count=2)).status == "cancelled"  # the lease has ended
        await setting.deliver(offer)
        assert await setting.receipt("r") == "cancelled"
        worker.proxy.send(Abort("r"))
        await eventually(setting.is_idle)
        cache = await worker.role.thread.call(lambda engine: engine.cache, 5.0)
        assert cache.used_bytes == 0
        assert worker.gauge("inputs_landing") == 0


async def test_what_has_come_of_a_tensor_that_stops_coming_is_let_go_of_when_its_handoff_would_end(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context
) -> None:
    async with in_process(broker_url, redis, zmq_context, PrefillDecodeService, handoff_timeout_s=0.3) as worker:
        address = addresses_by_scheme((await worker.record()).tensor_address)["tcp"]
        size = PIECE_BYTES + 1
        header = TensorHeader("r", 0, 0, "peer", 1, [size], "uint8", size)
        with capture_logs() as logs, zmq_context.socket(zmq.DEALER) as sender:
            sender.connect(address)
            await sender.send_multipart([encode(First(header, size)), bytes(PIECE_BYTES)])
            await eventually(lambda: any("did not come to its end" in line["event"] for line in logs))
        assert worker.gauge("tensors_unfinished_total") == 1


async def test_a_withdrawn_offer_frees_its_room_at_once_and_any_other_withdrawal_nothing(setting: Setting) -> None:
    offer = await setting.granted("r")
    setting.peer.send("metadata", setting.offer("early"))  # its request will never come
    await eventually(lambda: setting.worker.gauge("offers_open") == 2)
    for other in (Withdraw("r", 0, 1, "peer"), Withdraw("r", 0, 0, "impostor"), Withdraw("nobody", 0, 0, "peer")):
        setting.peer.send("metadata", other)
    for request_id in ("r", "early", "early"):
        setting.peer.send("metadata", Withdraw(request_id, 0, 0, "peer"))
    await eventually(lambda: setting.worker.gauge("offers_open") == 0)
    stats = await setting.worker.role.thread.call(lambda engine: engine.stats(), 5.0)
    assert [stats[name] for name in ("inputs_granted", "early_offers", "encoder_cache_bytes_used")] == [0, 0, 0]
    assert setting.worker.tally("handoffs") == {"granted": 1, "withdrawn": 2}
    assert setting.worker.gauge("inputs_landing") == 0
    await setting.deliver(offer)
    assert await setting.receipt("r") == "cancelled"
    setting.peer.send("metadata", setting.offer("r", attempt=1))
    assert (await setting.peer.message(Grant, "r", count=2)).status == "granted"
    setting.worker.proxy.send(Abort("r"))


async def test_with_too_many_offers_under_way_a_new_one_is_refused_as_overload(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.handoff.receiver.MAX_OFFERS", 1)
    first = await setting.granted("r")
    setting.peer.send("metadata", setting.offer("one too many"))
    refused = await setting.peer.message(Grant, "one too many")
    assert (refused.status, refused.error.code) == ("refused", "overloaded")
    assert setting.worker.tally("handoffs") == {"granted": 1, "overflow": 1, "refused": 1}
    setting.peer.send("metadata", first)
    assert (await setting.peer.message(Grant, "r", count=2)).status == "granted", "the same one again is not a new one"
    setting.worker.proxy.send(Abort("r"))


async def test_an_offer_whose_numbers_do_not_add_up_is_refused(setting: Setting) -> None:
    setting.peer.send("metadata", setting.offer("r", size_bytes=5))
    grant = await setting.peer.message(Grant, "r")
    assert (grant.status, grant.error.code) == ("refused", "internal_error"), "no fault of the client's"
    assert "5" in grant.error.message


async def test_an_abort_frees_the_room_and_cancels_what_comes_later(setting: Setting) -> None:
    offer = await setting.granted("r")
    setting.worker.proxy.send(Abort("r"))
    await eventually(setting.is_idle)
    await setting.deliver(offer)
    assert await setting.receipt("r") == "cancelled"
    setting.peer.send("metadata", setting.offer("r", attempt=1))
    assert (await setting.peer.message(Grant, "r", count=2)).status == "cancelled"


async def test_sequences_are_told_apart_and_one_can_be_stopped(setting: Setting) -> None:
    """The first sequence is stopped at once; the others end, and the last message of all is marked."""
    text = TextProcessor(load_model_info("signpost"))
    ids = text.render_chat([{"role": "user", "content": "Which colours are there?"}])
    sampling = SamplingParams(
        n=3, max_tokens=100, temperature=1.0, seed=1, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    setting.worker.proxy.send(Generate("r", ids, [], sampling, priority=-1))
    await eventually(lambda: len(setting.worker.of(Tokens, "r")) > 3)
    setting.worker.proxy.send(StopSequence("r", 0))
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "r")))
    messages = setting.worker.of(Tokens, "r")
    tokens = {index: [m for m in messages if m.index == index] for index in range(3)}
    assert [sum(len(m.token_ids) for m in tokens[index]) for index in (1, 2)] == [100, 100]
    assert len(tokens[0]) < 100
    assert all(len(m.logprobs) == len(m.token_ids) for m in messages)
    assert [m.done for m in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].num_prompt_tokens == len(ids)
    assert len(next(m for m in messages if m.prompt_logprobs).prompt_logprobs) == len(ids)


async def test_a_request_whose_answer_is_too_large_to_be_sent_ends_and_leaves_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture looks at the end whether anything is left: it would have gone on for a whole context."""
    monkeypatch.setattr(rpc, "MAX_FROM_WORKER_BYTES", 3000)
    text = TextProcessor(load_model_info("signpost"))
    ids = text.render_chat([{"role": "user", "content": "Which colours are there? " * 5}])
    long = SamplingParams(max_tokens=setting.worker.shell._info.max_model_len - len(ids), ignore_eos=True)
    setting.worker.proxy.send(Generate("small", ids, [], msgspec.structs.replace(long, max_tokens=50)))
    asked = Generate("large", ids, [], msgspec.structs.replace(long, prompt_logprobs=20), attempt=2)
    setting.worker.proxy.send(asked)
    failed = await setting.worker.one(Failed, "large")
    assert (failed.error.code, failed.attempt) == ("item_too_large", 2)
    assert "Tokens message has" in failed.error.message
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "small")))
    await eventually(setting.is_idle)
    assert setting.worker.of(Tokens, "large") == []


async def test_the_tokens_of_a_step_travel_together(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[tuple[str, ...]] = []
    send = WorkerServer.send

    def noted(server: WorkerServer, proxy: bytes, *messages: Any) -> list[Outcome]:
        together.append(tuple(message.request_id for message in messages if isinstance(message, Tokens)))
        return send(server, proxy, *messages)

    monkeypatch.setattr(WorkerServer, "send", noted)
    ids = TextProcessor(load_model_info("signpost")).render_chat([{"role": "user", "content": "Which colours?"}])
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    for name in ("a", "b"):
        setting.worker.proxy.send(Generate(name, ids, [], sampling))
    for name in ("a", "b"):
        await eventually(lambda name=name: any(message.done for message in setting.worker.of(Tokens, name)))
        messages = setting.worker.of(Tokens, name)
        assert [message.offset for message in messages] == list(range(200))
    assert {"a", "b"} in map(set, together)


@pytest.mark.parametrize("is_long_full", [False, True], ids=["for a moment", "until the proxy is told of it, too"])
async def test_no_token_follows_one_that_a_full_queue_did_not_take(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, is_long_full: bool
) -> None:
    send, untold = WorkerServer.send, [Failed] if is_long_full else []

    def full_once(server: WorkerServer, proxy: bytes, *messages: Any) -> list[Outcome]:
        if any(isinstance(message, Tokens) and message.offset == 3 for message in messages):
            return ["gone"] * len(messages)
        if messages and type(messages[0]) in untold:
            untold.clear()
            return ["gone"] * len(messages)
        return send(server, proxy, *messages)

    monkeypatch.setattr(WorkerServer, "send", full_once)
    ids = TextProcessor(load_model_info("signpost")).render_chat([{"role": "user", "content": "Which colours?"}])
    setting.worker.proxy.send(Generate("r", ids, [], SamplingParams(max_tokens=400, ignore_eos=True), attempt=1))
    await eventually(lambda: setting.worker.gauge("requests_outstanding") == 1)

    def told() -> bool:
        setting.worker.proxy.send(Heartbeat())  # at which the worker tells what it has lost
        return bool(setting.worker.of(Failed, "r"))

    await eventually(told)
    assert [message.offset for message in setting.worker.of(Tokens, "r")] == [0, 1, 2]
    assert setting.worker.of(Failed, "r")[0].error.code == "unavailable"


async def test_tokens_leave_before_the_error_that_ends_their_request(setting: Setting) -> None:
    ids = TextProcessor(load_model_info("signpost")).render_chat([{"role": "user", "content": "Which colours?"}])
    setting.worker.proxy.send(Generate("r", ids, [], SamplingParams(max_tokens=50, ignore_eos=True), attempt=1))
    await setting.worker.one(Tokens, "r")
    last, error = Tokens("r", 1000, [1], attempt=1), Failed("r", ErrorInfo("internal_error", "broken"), 1)
    setting.worker.role._handle_events([last, error, Tokens("r", 1001, [1], attempt=1)])
    await setting.worker.one(Failed, "r")
    assert setting.worker.answers[-2:] == [last, error]
    await eventually(setting.is_idle)
    assert setting.worker.answers[-1] == error


async def test_a_resumed_request_goes_on_as_if_it_had_never_moved(setting: Setting) -> None:
    text = TextProcessor(load_model_info("signpost"))
    ids = text.render_chat([{"role": "user", "content": "Which colours are there?"}])
    sampling = SamplingParams(n=2, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, frequency_penalty=0.5)
    setting.worker.proxy.send(Generate("whole", ids, [], sampling))
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "whole")))
    whole = _sequences(setting.worker.of(Tokens, "whole"))
    resumed = [Resumed(0, whole[0][:5]), Resumed(1, whole[1][:2])]
    setting.worker.proxy.send(Generate("rest", ids, [], sampling, resumed=resumed))
    await eventually(lambda: any(message.done for message in setting.worker.of(Tokens, "rest")))
    rest = setting.worker.of(Tokens, "rest")
    assert _sequences(rest) == {0: whole[0][5:], 1: whole[1][2:]}
    assert {index: min(m.offset for m in rest if m.index == index) for index in (0, 1)} == {0: 5, 1: 2}


def _sequences(messages: list[Tokens]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for message in messages:
        found.setdefault(message.index, []).extend(message.token_ids)
    return found


async def test_a_proxy_that_reads_nothing_is_dropped_and_disturbs_nobody(
    broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.cluster.rpc.QUEUE_MESSAGES", 50)
    ids = TextProcessor(load_model_info("signpost")).render_chat([{"role": "user", "content": "Which colours?"}])
    async with in_process(broker_url, redis, zmq_context, PrefillDecodeService) as worker:
        worker.shell._proxies._silence_s = 1000.0  # it is not for its silence that it is dropped
        deaf = zmq_context.socket(zmq.DEALER)
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 1024), (zmq.IDENTITY, b"deaf")):
            deaf.setsockopt(option, value)
        deaf.connect((await worker.record()).requests_address)
        endless = SamplingParams(n=8, max_tokens=450, temperature=1.0, seed=1, ignore_eos=True, logprobs=20)
        for number in range(8):
            await deaf.send(encode(Generate(f"deaf-{number}", ids, [], endless)))
        await eventually(lambda: worker.gauge("requests_outstanding") == 8)
        worker.proxy.send(Generate("r", ids, [], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
        await eventually(lambda: any(message.done for message in worker.of(Tokens, "r")), 20.0)
        await eventually(lambda: worker.gauge("requests_outstanding") == 0, 20.0)
        stats = await worker.role.thread.call(lambda engine: engine.stats(), 5.0)
        assert stats["generated_tokens_total"] < 8 * 8 * 450
        assert stats["kv_blocks_used"] == 0


def test_tensors_lie_at_even_addresses() -> None:
    buffer = bytearray(range(256)) * 4
    for offset in range(ALIGNMENT_BYTES):
        data = aligned(memoryview(buffer)[offset : offset + 512])
        assert np.frombuffer(data, np.uint8).__array_interface__["data"][0] % ALIGNMENT_BYTES == 0
        assert bytes(data) == bytes(buffer[offset : offset + 512])
