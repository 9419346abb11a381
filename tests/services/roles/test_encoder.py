"""The encoder worker against a receiver that answers as each test wants: every stage's end leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from redis.asyncio import Redis
from structlog.testing import capture_logs

from broker.cluster.redis_client import connect
from broker.cluster.registry import Registry
from broker.transports.received import PushedTensor
from broker.transports.shm import push_buffer
from broker.transports.tensors import ReceivedTensor
from common.errors import ErrorInfo
from common.messages import Abort, Encoded, Failed, Generate, Offer, Receipt
from common.sampling_params import SamplingParams
from services.encode.output_sink import RemoteSink
from services.encode.preprocess_pool import MemoryGate
from services.roles.encoder import EncoderService
from tests.eventually import eventually
from tests.services.cluster import encode_order, sign
from tests.services.inprocess import CLUSTER, InProcess, Peer, in_process

HOLDS = (
    "encoder_items_open",
    "encoder_items_computing",
    "encoder_held_bytes",
    "handoffs_open",
    "preprocess_waiting",
    "requests_outstanding",
)


@dataclasses.dataclass
class Setting:
    worker: InProcess[EncoderService]
    peer: Peer

    async def encode(self, request_id: str, *, to: str = "peer", colour: str = "red", **changes: Any) -> None:
        self.worker.proxy.send(encode_order(request_id, 0, sign(colour), to=to, **changes))

    async def offer(self, request_id: str, count: int = 1) -> Offer:
        offer = await self.peer.message(Offer, request_id, count)
        assert isinstance(offer, Offer)
        return offer

    async def offer_of(self, request_id: str, attempt: int) -> Offer:
        found: list[Offer] = []

        def is_here() -> bool:
            found[:] = [offer for offer in self.peer.of(Offer, request_id) if offer.attempt == attempt]
            return bool(found)

        await eventually(is_here)
        return found[0]

    async def deliver(self, request_id: str) -> bytes:
        """Grant an item that has been offered, take what comes, and confirm it."""
        self.peer.grant(await self.offer(request_id))
        tensor = await self.peer.tensor()
        assert tensor.header.request_id == request_id
        self.peer.send("injected", Receipt(request_id, 0, 0, "stored"))
        reply = await self.reply(request_id)
        assert reply.error is None
        return bytes(tensor.data)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """The engine computes nothing until the end of the block."""
        over = threading.Event()
        self.worker.role.stage.thread.submit(lambda _: over.wait(20) and None)
        try:
            yield
        finally:
            over.set()

    async def given_while_busy(self, request_id: str, *, colour: str = "red") -> ReceivedTensor:
        """What comes of an item that is computed once all is ready for it, memory for its output included. It is not
        confirmed."""
        with self.busy():
            await self.encode(request_id, colour=colour)
            self.peer.grant(await self.offer(request_id))
            await self.computing(1)
        return await self.peer.tensor()

    async def computing(self, num_items: int) -> None:
        """So many items wait for the engine, and memory that has been given for their outputs has been touched."""
        granted = self.worker.role.stage._sink._granted
        await eventually(lambda: self.worker.gauge("encoder_items_computing") == num_items)
        await eventually(lambda: all(one.early is None or one.early._state == "ready" for one in granted.values()))

    async def reply(self, request_id: str) -> Encoded:
        return await self.worker.one(Encoded, request_id)

    async def abort(self, request_id: str) -> None:
        self.worker.proxy.send(Abort(request_id))
        await eventually(self.is_idle)

    def is_idle(self) -> bool:
        return not any(self.worker.gauge(name) for name in HOLDS)

    async def num_encoded(self) -> float:
        stats = await self.worker.role.stage.thread.call(lambda engine: engine.stats(), 5.0)
        assert stats["encoder_queue_items"] == 0
        return stats["encoder_items_total"]


@pytest.fixture
async def setting(broker_url: str, redis: Redis, zmq_context: zmq.asyncio.Context) -> AsyncIterator[Setting]:
    async with (
        in_process(
            broker_url, redis, zmq_context, EncoderService, engine={"max_waiting": 4}, handoff_timeout_s=5.0
        ) as worker,
        Peer(redis, zmq_context, await worker.record(), "prefill_decode").alive() as peer,
    ):
        setting = Setting(worker, peer)
        yield setting
        await eventually(setting.is_idle)
    assert await redis.keys("*") == []


@pytest.fixture
async def giving(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """One that gives memory for every output from now on: none is too small, and the first has connected the two."""
    monkeypatch.setattr(push_buffer, "MIN_BYTES", 1)
    await setting.encode("first", colour="blue")
    await setting.deliver("first")
    return setting


async def test_the_offer_leaves_before_anything_is_computed_and_the_tensor_is_what_was_offered(
    setting: Setting,
) -> None:
    await setting.encode("r")
    offer = await setting.offer("r")
    assert await setting.num_encoded() == 0
    assert offer.size_bytes == offer.shape[0] * offer.shape[1] * 4
    assert (offer.sender, offer.dtype) == ("w0", "float32")
    setting.peer.grant(offer)
    tensor = await setting.peer.tensor()
    assert tensor.fault is None
    assert (tensor.header.shape, tensor.header.receiver_epoch) == (offer.shape, setting.peer.record.epoch)
    setting.peer.send("injected", Receipt("r", 0, 0, "stored"))
    reply = await setting.reply("r")
    assert reply.error is None
    assert [span.stage for span in reply.spans] == ["preprocess", "grant", "encode", "handoff"]
    assert all(span.start_s <= span.end_s for span in reply.spans)


async def test_a_debug_log_tells_the_walk_of_an_item(setting: Setting) -> None:
    with capture_logs() as logs:
        await setting.encode("r")
        await setting.deliver("r")
        await eventually(setting.is_idle)
    told = [entry.get("moment", entry["event"]) for entry in logs if entry.get("request") == "r"]
    assert {entry["log_level"] for entry in logs if entry.get("request") == "r"} == {"debug"}
    walk = ["item received", "request received", "encode_received", "preprocessed", "item offered", "item granted"]
    walk += ["encode_start", "encode_done", "output leaves"]
    walk += ["offer_sent", "grant_received", "tensor_sent", "receipt_received"]  # with the times of these moments
    assert told == [*walk, "output stored by its receiver", "item answered", "request ended"]


async def test_cached_and_refused_items_are_never_computed(setting: Setting) -> None:
    await setting.encode("cached")
    setting.peer.grant(await setting.offer("cached"), status="cached")
    assert (await setting.reply("cached")).error is None
    error = ErrorInfo("item_too_large", "needs 9 bytes of a budget of 8", "messages")
    await setting.encode("refused")
    setting.peer.grant(await setting.offer("refused"), status="refused", error=error)
    assert (await setting.reply("refused")).error == error
    assert await setting.num_encoded() == 0
    assert setting.worker.tally("handoffs") == {"cached": 1, "refused": 1}


async def test_an_output_that_is_kept_goes_to_the_next_one_without_preprocessing_or_computing(setting: Setting) -> None:
    await setting.encode("first")
    tensor = await setting.deliver("first")
    await setting.encode("second")
    assert await setting.deliver("second") == tensor
    assert [span.stage for span in (await setting.reply("second")).spans] == ["grant", "handoff"]
    assert await setting.num_encoded() == 1
    assert setting.worker.gauge("encoder_output_cache_hits_total") == 1
    assert setting.worker.gauge("encoder_output_cache_bytes_used") == len(tensor)


async def test_an_output_on_its_way_survives_what_others_need_room_for(setting: Setting) -> None:
    outputs = setting.worker.role.stage._outputs
    await setting.encode("first")
    tensor = await setting.deliver("first")
    outputs.capacity_bytes = len(tensor)
    await setting.encode("on its way")
    await setting.offer("on its way")
    await setting.encode("other", colour="blue")
    assert await setting.deliver("other") != tensor
    assert await setting.deliver("on its way") == tensor
    assert (outputs.evictions, outputs.used_bytes) == (0, len(tensor))
    await setting.encode("again", colour="blue")
    await setting.deliver("again")
    assert await setting.num_encoded() == 3
    assert outputs.evictions == 1
    await setting.encode("gone")
    assert await setting.deliver("gone") == tensor
    assert await setting.num_encoded() == 4


async def test_an_output_leaves_by_the_thread_that_has_made_it(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first, which connects the two."""
    monkeypatch.setattr(push_buffer, "MIN_BYTES", 1)
    names = ("first", "second", "third")
    arrived: list[ReceivedTensor] = []
    for name, colour in zip(names, ("red", "blue", "green"), strict=True):
        arrived.append(await setting.given_while_busy(name, colour=colour))
        setting.peer.send("injected", Receipt(name, 0, 0, "stored"))
        assert (await setting.reply(name)).error is None
    assert [isinstance(tensor, PushedTensor) for tensor in arrived] == [False, True, True]
    assert all(tensor.fault is None for tensor in arrived)
    assert setting.worker.tally("tensors_sent") == {"shm+unix": 3}
    for name, tensor, colour in zip(names, arrived, ("red", "blue", "green"), strict=True):
        await setting.encode(f"{name} again", colour=colour)  # it has been kept
        assert await setting.deliver(f"{name} again") == bytes(tensor.data)


async def test_an_output_that_has_left_and_not_arrived_is_sent_again(giving: Setting) -> None:
    tensor = await giving.given_while_busy("r")
    assert isinstance(tensor, PushedTensor)
    giving.peer.send("injected", Receipt("r", 0, 0, "corrupt"))
    again = await giving.peer.tensor()
    assert not isinstance(again, PushedTensor)
    assert again.data == tensor.data
    giving.peer.send("injected", Receipt("r", 0, 0, "stored"))
    assert (await giving.reply("r")).error is None


async def test_what_was_given_for_an_aborted_item_is_taken_back(giving: Setting) -> None:
    with giving.busy():
        await giving.encode("r")
        giving.peer.grant(await giving.offer("r"))
        target = await giving.peer.pushed()
        await giving.abort("r")
        await eventually(lambda: target.memory is None)
    header = target.header
    assert (header.request_id, header.sender, header.receiver_epoch) == ("r", "w0", giving.peer.record.epoch)


async def test_an_output_leaves_for_another_who_waits_where_the_first_is_aborted(giving: Setting) -> None:
    with giving.busy():
        for name in ("first of two", "second"):
            await giving.encode(name)
            giving.peer.grant(await giving.offer(name))
        await giving.computing(2)
        giving.worker.proxy.send(Abort("first of two"))
        await giving.computing(1)
    tensor = await giving.peer.tensor()
    assert isinstance(tensor, PushedTensor)
    assert tensor.header.request_id == "second"
    giving.peer.send("injected", Receipt("second", 0, 0, "stored"))
    assert (await giving.reply("second")).error is None
    assert giving.worker.role.stage._dedup._computations == {}


async def test_equal_items_under_way_are_computed_once_for_those_that_are_not_aborted(setting: Setting) -> None:
    aborted = ("first", "only one of its colour")
    with setting.busy():
        for name in ("first", "second", "third", "only one of its colour"):
            await setting.encode(name, colour="blue" if "colour" in name else "red")
            setting.peer.grant(await setting.offer(name))
        await setting.computing(4)
        for name in aborted:
            setting.worker.proxy.send(Abort(name))
        await setting.computing(2)
    tensors = [await setting.peer.tensor() for _ in range(2)]
    assert {tensor.header.request_id for tensor in tensors} == {"second", "third"}
    assert bytes(tensors[0].data) == bytes(tensors[1].data)
    for name in ("second", "third"):
        setting.peer.send("injected", Receipt(name, 0, 0, "stored"))
        assert (await setting.reply(name)).error is None
    assert await setting.num_encoded() == 1
    assert setting.worker.gauge("encoder_items_shared_total") == 2


async def test_a_receiver_of_another_model_gets_nothing(setting: Setting) -> None:
    other = msgspec.structs.replace(setting.peer.record, instance_id="stranger", fingerprint="beef")
    registry = Registry(setting.peer.redis, CLUSTER)
    await registry.register(other)
    await setting.encode("r", to="stranger")
    error = (await setting.reply("r")).error
    await registry.unregister()
    assert error is not None
    assert all(word in error.message for word in ("w0", "stranger", "beef", setting.peer.record.fingerprint))


async def error_without_a_registry(setting: Setting, nobody: Redis, **settings: float) -> ErrorInfo:
    """What an encoder says that looks for a receiver at `nobody`."""
    stage = setting.worker.role.stage
    changed = stage._context.settings.model_copy(update=settings)
    context = dataclasses.replace(stage._context, registry=Registry(nobody, CLUSTER), settings=changed)
    stage._sink = RemoteSink(context, setting.worker.role._handoffs)
    await setting.encode("r", to="never seen")
    error = (await setting.reply("r")).error
    assert error is not None
    assert error.code == "unavailable"
    return error


async def test_a_receiver_that_cannot_be_looked_up_may_be_asked_for_again(setting: Setting) -> None:
    async with connect("redis://127.0.0.1:1", retries=0) as nobody:
        error = await error_without_a_registry(setting, nobody)
    assert error.message.startswith("the broker does not answer")


async def test_a_broker_that_says_nothing_of_a_receiver_is_waited_for_like_a_step_of_a_handoff(
    setting: Setting,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with connect(f"redis://127.0.0.1:{silent.getsockname()[1]}") as nobody:
            error = await error_without_a_registry(setting, nobody, handoff_timeout_s=0.3)
    assert error.message.endswith("never seen cannot be looked up: nothing within 0.3 s")


async def test_a_receiver_that_never_answers_costs_no_more_than_the_deadline(setting: Setting) -> None:
    await setting.encode("silent", timeout_s=0.5)
    reply = await setting.reply("silent")
    assert reply.error is not None
    assert reply.error.code == "timeout"
    await setting.encode("too late", timeout_s=-1.0)
    late = await setting.reply("too late")
    assert late.error is not None
    assert late.error.code == "timeout"
    assert not late.undelivered, "nothing was ever sent"


async def test_what_an_attempt_has_waited_for_in_vain_is_there_for_the_next_one(setting: Setting) -> None:
    """It is preprocessed once and computed once, however often it has not been ready by its deadline."""
    with setting.busy():
        for attempt in range(3):
            await setting.encode("r", attempt=attempt, timeout_s=20.0 if attempt == 2 else 2.0)
            setting.peer.grant(await setting.offer_of("r", attempt))
            await setting.computing(1)
            if attempt < 2:
                await eventually(lambda number=attempt + 1: len(setting.worker.of(Encoded, "r")) == number)
    tensor = await setting.peer.tensor()
    assert tensor.header.attempt == 2
    setting.peer.send("injected", Receipt("r", 0, 2, "stored"))
    await eventually(lambda: len(setting.worker.of(Encoded, "r")) == 3)
    first, second, last = setting.worker.of(Encoded, "r")
    assert [reply.error and reply.error.code for reply in (first, second, last)] == ["timeout", "timeout", None]
    assert not first.undelivered
    stages = [[span.stage for span in reply.spans] for reply in (first, second, last)]
    assert stages == [["preprocess", "grant"], ["grant"], ["grant", "encode", "handoff"]]
    assert await setting.num_encoded() == 1
    assert setting.worker.gauge("encoder_items_shared_total") == 0


async def test_an_output_that_was_not_taken_in_time_is_there_for_the_next_attempt(setting: Setting) -> None:
    setting.worker.role.stage._outputs.capacity_bytes = 0  # nothing is kept for anybody else
    await setting.encode("r", timeout_s=2.0)
    setting.peer.grant(await setting.offer("r"))
    tensor = await setting.peer.tensor()
    late = await setting.reply("r")
    assert late.error is not None
    assert late.error.code == "timeout"
    assert late.undelivered, "somebody else may have a better way there"
    await setting.encode("r", attempt=1)
    setting.peer.grant(await setting.offer_of("r", 1))
    again = await setting.peer.tensor()
    assert (again.header.attempt, again.data) == (1, tensor.data)
    setting.peer.send("injected", Receipt("r", 0, 1, "stored"))
    await eventually(lambda: len(setting.worker.of(Encoded, "r")) == 2)
    assert await setting.num_encoded() == 1


async def test_what_no_attempt_asks_for_any_more_is_dropped(setting: Setting) -> None:
    with setting.busy():
        await setting.encode("r", timeout_s=2.0)
        setting.peer.grant(await setting.offer("r"))
        await setting.computing(1)
        await setting.reply("r")
        assert setting.worker.gauge("encoder_items_computing") == 1
        assert setting.worker.gauge("handoffs_open") == 0
        await eventually(setting.is_idle)
    assert await setting.num_encoded() == 0


async def test_a_newer_attempt_replaces_an_older_one(setting: Setting) -> None:
    await setting.encode("r", attempt=0)
    old = await setting.offer("r")
    await setting.encode("r", attempt=1)
    new = await setting.offer("r", count=2)
    setting.peer.grant(old)
    setting.peer.grant(new, status="cached")
    reply = await setting.reply("r")
    assert reply.attempt == 1
    assert len(setting.worker.answers) == 1
    await eventually(lambda: setting.worker.tally("handoffs").get("stray") == 1)


async def test_more_items_than_the_queue_holds_are_refused_as_overload(setting: Setting) -> None:
    for number in range(5):
        await setting.encode(f"r{number}")
    reply = await setting.reply("r4")
    assert reply.error is not None
    assert reply.error.code == "overloaded"
    assert "limit is 4" in reply.error.message
    for number in range(4):
        setting.worker.proxy.send(Abort(f"r{number}"))
    await eventually(setting.is_idle)
    assert len(setting.worker.answers) == 1


async def test_an_item_that_finds_no_room_is_not_preprocessed_before_there_is_some(setting: Setting) -> None:
    setting.worker.role.stage._pool.gate = MemoryGate(limit_bytes=1, max_unweighed=1)
    await setting.encode("first")
    first = await setting.offer("first")
    await setting.encode("impatient", timeout_s=0.3)
    await setting.encode("second")
    late = await setting.reply("impatient")
    assert late.error is not None
    assert late.error.code == "timeout"
    assert setting.worker.gauge("preprocess_waiting") == 2  # it may be asked for again
    setting.worker.proxy.send(Abort("impatient"))
    await eventually(lambda: setting.worker.gauge("preprocess_waiting") == 1)
    assert [offer.request_id for offer in setting.peer.received if isinstance(offer, Offer)] == ["first"]
    setting.peer.grant(first, status="cached")
    setting.peer.grant(await setting.offer("second"), status="cached")
    assert (await setting.reply("second")).error is None


async def test_an_item_that_waits_for_a_grant_makes_way_at_its_deadline_for_one_that_waits_for_memory(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one destination that grants nothing would keep an encoder from working for all others."""
    monkeypatch.setattr("services.encode.encode_stage.KEEP_S", 1000.0)
    setting.worker.role.stage._pool.gate = MemoryGate(limit_bytes=1, max_unweighed=1)
    await setting.encode("first", timeout_s=0.5)
    await setting.offer("first")
    await setting.encode("second")
    late = await setting.reply("first")
    assert late.error is not None
    assert late.error.code == "timeout"
    setting.peer.grant(await setting.offer("second"), status="cached")
    assert (await setting.reply("second")).error is None


async def test_an_offer_that_its_receiver_gives_up_at_the_deadline_has_only_taken_too_long(setting: Setting) -> None:
    await setting.encode("r", timeout_s=0.4)
    setting.peer.grant(await setting.offer("r"), status="cancelled")
    late = await setting.reply("r")
    assert late.error is not None
    assert late.error.code == "timeout"


@pytest.mark.parametrize("stage", ["preprocess", "grant", "encode", "receipt"])
async def test_an_abort_frees_the_item_at_every_stage(setting: Setting, stage: str) -> None:
    with setting.busy() if stage == "encode" else contextlib.nullcontext():
        await setting.encode("r")
        if stage != "preprocess":
            offer = await setting.offer("r")
            if stage != "grant":
                setting.peer.grant(offer)
            if stage == "encode":
                await setting.computing(1)
            if stage == "receipt":
                await setting.peer.tensor()
        await setting.abort("r")
    assert setting.worker.answers == []
    assert await setting.num_encoded() <= 1


async def test_what_an_encoder_does_not_do_is_said(setting: Setting) -> None:
    setting.worker.proxy.send(Generate("r", [1], [], SamplingParams()))
    failed = await setting.worker.one(Failed, "r")
    assert "is an encoder" in failed.error.message
