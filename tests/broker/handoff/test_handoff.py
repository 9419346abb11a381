"""The sender's side of a handoff: every order of messages, every refusal, every silence has its defined end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import zmq.asyncio
from redis.asyncio import Redis

from broker.cluster.registry import ABSENCE_S, BLIND_S, HEARTBEAT_S
from broker.handoff.channels import ChannelReader, ChannelSender, Delivery
from broker.handoff.sender import MAX_SENDS, Handoff, HandoffSender, Part, key_of
from broker.transports.factory import TransportContext
from broker.transports.tensors import TensorReceiver, TensorSender
from common.errors import ErrorInfo, TriptychError
from common.messages import (
    KV_INPUT_ID,
    Grant,
    HandoffMessage,
    InputLayout,
    InstanceRecord,
    KvOffer,
    Offer,
    Receipt,
    Withdraw,
)
from tests.broker.conftest import make_record, running
from tests.broker.transports.transport_kit import receive
from tests.deadlines import timeless
from tests.eventually import eventually

DATA = memoryview(bytes(range(64)))


def make_offer(request_id: str = "r", attempt: int = 0, deadline_s: float | None = None) -> Offer:
    layout = InputLayout(4, [(7, 4)])
    deadline_s = time.monotonic() + 5 if deadline_s is None else deadline_s
    return Offer(request_id, 0, attempt, "hash", "image", [4, 8], "bfloat16", 64, layout, "e0", deadline_s)


def make_kv_offer(request_id: str = "r") -> KvOffer:
    shape, deadline_s = [2, 2, 1, 4], time.monotonic() + 5
    return KvOffer(request_id, 0, 8, 0, shape, [], "bfloat16", [], 1, 0, "p0", deadline_s)


def make_part(first: int, num_tokens: int) -> Part:
    data = memoryview(bytes([first]) * num_tokens * 32)
    return Part([num_tokens, 2, 2, 1, 4], "bfloat16", data, "self", first)


def delivery(message: HandoffMessage, *, stale: bool = False) -> Delivery:
    return Delivery(b"stream", b"1-0", message, stale)


@dataclass
class Pair:
    """A sender, and the receiver's sockets and streams, which each test answers from as it likes."""

    sender: HandoffSender
    receiver: InstanceRecord
    tensors: TensorReceiver
    offers: list[Offer | KvOffer]
    withdrawn: list[Withdraw]

    async def granted(self, offer: Offer | KvOffer) -> Handoff:
        offering = asyncio.create_task(self.sender.offer(offer, self.receiver))
        await eventually(lambda: self.sender.num_open == 1)
        self.sender.handle(delivery(Grant(*key_of(offer), "granted")))
        return await offering


@pytest.fixture
async def pair(redis: Redis, zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 60.0)  # nothing is said twice but where a test wants it
    channels, tensors = ChannelSender(redis, "c"), TensorSender(TransportContext(zmq_context))
    receiver = TensorReceiver(TransportContext(zmq_context), max_bytes=2**20)
    reader = ChannelReader(redis, "c", "d0", ("metadata",))
    await reader.open()
    sender = HandoffSender(channels, tensors, timeout_s=2.0)
    sender.own = make_record("e0")
    offers: list[Offer | KvOffer] = []
    withdrawn: list[Withdraw] = []

    def take(received: Delivery) -> None:
        if isinstance(received.message, Withdraw):
            withdrawn.append(received.message)
        else:
            assert isinstance(received.message, Offer | KvOffer)
            offers.append(timeless(received.message))

    record = make_record("d0", "prefill_decode", tensor_address=receiver.address)
    async with running(channels.run(), reader.run(take)):
        yield Pair(sender, record, receiver, offers, withdrawn)
    tensors.close()
    receiver.close()


async def test_offer_grant_tensor_receipt(pair: Pair) -> None:
    offer = make_offer()
    offering = asyncio.create_task(pair.sender.offer(offer, pair.receiver))
    await eventually(lambda: pair.offers == [timeless(offer)])
    pair.sender.handle(delivery(Grant("r", 0, 0, "granted")))
    handoff = await offering
    delivering = asyncio.create_task(pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA))
    received = await pair.tensors.receive()
    assert received.data == DATA
    assert (received.header.sender, received.header.receiver_epoch) == ("e0", pair.receiver.epoch)
    pair.sender.handle(delivery(Receipt("r", 0, 0, "stored")))
    await delivering
    assert pair.sender.num_open == 0
    assert pair.sender.outcomes == {"stored": 1}
    assert list(handoff.times_s) == ["offer_sent", "grant_received", "tensor_sent", "receipt_received"]


async def test_cached_content_is_neither_computed_nor_sent(pair: Pair) -> None:
    offering = asyncio.create_task(pair.sender.offer(make_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    pair.sender.handle(delivery(Grant("r", 0, 0, "cached")))
    handoff = await offering
    assert handoff.grant.result().status == "cached"
    assert pair.sender.num_open == 0
    with pytest.raises(TriptychError, match="no tensor without a grant"):
        await pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA)


async def test_a_refusal_reaches_the_caller_in_the_receivers_words(pair: Pair) -> None:
    offering = asyncio.create_task(pair.sender.offer(make_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    error = ErrorInfo("item_too_large", "needs 9 bytes, the whole budget is 8", "messages")
    pair.sender.handle(delivery(Grant("r", 0, 0, "refused", error=error)))
    with pytest.raises(TriptychError) as caught:
        await offering
    assert caught.value.info == error
    assert pair.sender.outcomes == {"refused": 1}


@pytest.mark.parametrize("granted", [False, True])
async def test_a_handoff_that_is_given_up_is_withdrawn_once(pair: Pair, granted: bool) -> None:
    offer = make_offer()
    if granted:
        await pair.granted(offer)
    else:
        offering = asyncio.create_task(pair.sender.offer(offer, pair.receiver))
        await eventually(lambda: pair.sender.num_open == 1)
        offering.cancel()
    pair.sender.close(key_of(offer))
    pair.sender.close(key_of(offer))
    await eventually(lambda: pair.offers == [timeless(offer)])
    await eventually(lambda: pair.withdrawn == [Withdraw("r", 0, 0, "e0")])
    assert pair.sender.num_open == 0


async def test_a_handoff_that_is_done_is_not_withdrawn(pair: Pair) -> None:
    handoff = await pair.granted(make_kv_offer())
    sending = asyncio.create_task(pair.sender.send(handoff, make_part(0, 8)))
    (await receive(pair.tensors)).release()
    pair.sender.handle(delivery(Receipt("r", KV_INPUT_ID, 0, "stored")))
    await sending
    pair.sender.complete(handoff)
    cached = asyncio.create_task(pair.sender.offer(make_offer("cached"), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    pair.sender.handle(delivery(Grant("cached", 0, 0, "cached")))
    await cached
    await pair.granted(make_offer("given up"))
    pair.sender.close(("given up", 0, 0))  # what is sent last has overtaken nothing
    await eventually(lambda: [message.request_id for message in pair.withdrawn] == ["given up"])


@pytest.mark.parametrize("status", ["expired", "cancelled"])
async def test_a_tensor_that_is_not_stored_is_a_retryable_error(pair: Pair, status: str) -> None:
    handoff = await pair.granted(make_offer())
    delivering = asyncio.create_task(pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA))
    await pair.tensors.receive()
    pair.sender.handle(delivery(Receipt("r", 0, 0, status)))  # type: ignore[arg-type]
    with pytest.raises(TriptychError, match=status) as caught:
        await delivering
    assert caught.value.info.retryable
    assert pair.sender.num_open == 0


async def test_duplicates_and_strangers_change_nothing_and_are_counted(pair: Pair) -> None:
    handoff = await pair.granted(make_offer())
    for message in (
        Grant("r", 0, 0, "granted"),
        Grant("r", 0, 0, "cached"),
        Grant("r", 0, 1, "granted"),
        Receipt("somebody else", 0, 0, "stored"),
        make_offer(),
    ):
        pair.sender.handle(delivery(message))
    pair.sender.handle(delivery(Receipt("r", 0, 0, "stored"), stale=True))
    assert handoff.state == "granted"
    assert pair.sender.outcomes == {"duplicate": 2, "stray": 4}


async def test_a_grant_taken_back_while_encoding_sends_nothing(pair: Pair) -> None:
    handoff = await pair.granted(make_offer())
    pair.sender.handle(delivery(Grant("r", 0, 0, "cancelled")))
    with pytest.raises(TriptychError, match="took its grant back"):
        await pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA)
    assert pair.sender.num_open == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await pair.tensors.receive()


async def test_what_was_not_offered_is_not_sent(pair: Pair) -> None:
    for shape, dtype, data in (([4, 9], "bfloat16", DATA), ([4, 8], "float32", DATA), ([4, 8], "bfloat16", DATA[:-1])):
        handoff = await pair.granted(make_offer())
        with pytest.raises(TriptychError) as caught:
            await pair.sender.deliver(handoff, shape, dtype, data)
        assert caught.value.info.code == "internal_error"
    assert pair.sender.outcomes == {"mismatch": 3}


@pytest.mark.parametrize("silent_after", ["offer", "tensor"])
async def test_silence_ends_at_the_deadline(pair: Pair, silent_after: str) -> None:
    offer = make_offer(deadline_s=time.monotonic() + 1.0)
    started_s = time.monotonic()
    if silent_after == "offer":
        waiting: Awaitable[object] = pair.sender.offer(offer, pair.receiver)
    else:
        waiting = pair.sender.deliver(await pair.granted(offer), [4, 8], "bfloat16", DATA)
    with pytest.raises(TriptychError, match="within") as caught:
        await waiting
    assert caught.value.info.code == "timeout"
    assert time.monotonic() - started_s < 10.0
    assert pair.sender.num_open == 0


async def test_a_receiver_that_was_never_there_is_unavailable(pair: Pair) -> None:
    with pytest.raises(TriptychError, match="not registered") as caught:
        await pair.sender.offer(make_offer(), None)
    assert caught.value.info.code == "unavailable"


async def test_instances_that_do_not_fit_are_refused_naming_both(pair: Pair) -> None:
    other = make_record("d9", "prefill_decode", fingerprint="beef", tensor_address="tcp://127.0.0.1:1")
    with pytest.raises(TriptychError) as caught:
        await pair.sender.offer(make_offer(), other)
    assert all(word in caught.value.info.message for word in ("e0", "d9", "f00d", "beef"))


def _restarted(record: InstanceRecord) -> dict[str, InstanceRecord]:
    return {"d0": make_record("d0", "prefill_decode", epoch=record.epoch + 1, tensor_address=record.tensor_address)}


def _left(_: InstanceRecord) -> dict[str, InstanceRecord]:
    return {}


@pytest.mark.parametrize("registry", [_restarted, _left])
async def test_a_receiver_that_goes_or_restarts_ends_the_wait(
    pair: Pair, registry: Callable[[InstanceRecord], dict[str, InstanceRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offering = asyncio.create_task(pair.sender.offer(make_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    pair.sender.review({"d0": pair.receiver})
    assert not offering.done()
    monkeypatch.setattr("broker.cluster.registry.ABSENCE_S", 0.0)
    pair.sender.review(registry(pair.receiver))
    with pytest.raises(TriptychError) as caught:
        await offering
    assert caught.value.info.code == "unavailable"
    assert pair.sender.outcomes == {"gone": 1}


async def test_an_empty_registry_for_a_moment_ends_nothing(pair: Pair) -> None:
    offering = asyncio.create_task(pair.sender.offer(make_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    pair.sender.review({})
    pair.sender.handle(delivery(Grant("r", 0, 0, "granted")))
    assert (await offering).state == "granted"


async def _offering(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Task[Handoff], SimpleNamespace]:
    """An offer whose receiver has just been seen, and the sender's clock, which stands until `now_s` is moved."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("broker.cluster.registry.time", clock)
    offering = asyncio.create_task(pair.sender.offer(make_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    pair.sender.review({"d0": pair.receiver})
    return offering, clock


async def test_time_in_which_nobody_could_look_at_the_registry_is_no_absence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that stood still has let everybody's entry expire, and not everybody has entered itself again."""
    offering, clock = await _offering(pair, monkeypatch)
    began_s = clock.now_s = clock.now_s + 60.0
    pair.sender.review({})
    while not pair.sender.outcomes:
        clock.now_s += 1.0
        pair.sender.review({})
    assert clock.now_s - began_s == ABSENCE_S - HEARTBEAT_S
    with pytest.raises(TriptychError):
        await offering
    assert pair.sender.outcomes == {"gone": 1}


async def test_a_broker_that_is_always_slow_hides_no_receiver_that_has_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    offering, clock = await _offering(pair, monkeypatch)
    num_looks = 0
    while not pair.sender.outcomes and num_looks < 10:
        clock.now_s += 2.5 * BLIND_S
        num_looks += 1
        pair.sender.review({})
    assert num_looks == ABSENCE_S / HEARTBEAT_S
    with pytest.raises(TriptychError, match="has left the registry"):
        await offering


async def test_an_offer_to_a_receiver_known_from_before_is_no_sign_of_its_life(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    offering, clock = await _offering(pair, monkeypatch)
    clock.now_s += ABSENCE_S / 2
    pair.sender.review({})
    clock.now_s += ABSENCE_S / 3
    again = asyncio.create_task(pair.sender.offer(make_offer("again"), pair.sender.presence.get("d0")))
    await eventually(lambda: pair.sender.num_open == 2)
    clock.now_s += ABSENCE_S / 3
    pair.sender.review({})
    for waiting in (offering, again):
        with pytest.raises(TriptychError, match="has left the registry"):
            await waiting


async def test_a_cancelled_caller_leaves_nothing(pair: Pair) -> None:
    offering = asyncio.create_task(pair.sender.offer(make_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    offering.cancel()
    await asyncio.gather(offering, return_exceptions=True)
    assert pair.sender.num_open == 0
    pair.sender.handle(delivery(Grant("r", 0, 0, "granted")))  # comes too late for anybody
    assert pair.sender.outcomes == {"stray": 1}


async def test_keys_and_values_go_part_after_part_each_with_its_receipt(pair: Pair) -> None:
    handoff = await pair.granted(make_kv_offer())
    for number, first in enumerate((0, 3, 6)):
        sending = asyncio.create_task(pair.sender.send(handoff, make_part(first, min(3, 8 - first))))
        received = await receive(pair.tensors)
        header = received.header
        assert received.fault is None
        assert (header.input_id, header.part, header.table, header.first) == (KV_INPUT_ID, number, "self", first)
        pair.sender.handle(delivery(Receipt("r", KV_INPUT_ID, 0, "stored", part=number + 1)))  # of no part yet
        assert not sending.done()
        pair.sender.handle(delivery(Receipt("r", KV_INPUT_ID, 0, "stored", part=number)))
        await sending
        pair.sender.handle(delivery(Receipt("r", KV_INPUT_ID, 0, "stored", part=number)))
    pair.sender.complete(handoff)
    assert pair.sender.num_open == 0
    assert pair.sender.outcomes == {"duplicate": 6, "stored": 1}


async def test_a_part_that_came_corrupt_is_sent_again(pair: Pair) -> None:
    handoff = await pair.granted(make_kv_offer())
    part = make_part(0, 8)
    sending = asyncio.create_task(pair.sender.send(handoff, part))
    for status in ("corrupt", "corrupt", "stored"):
        assert (await pair.tensors.receive()).data == part.data
        pair.sender.handle(delivery(Receipt("r", KV_INPUT_ID, 0, status)))  # type: ignore[arg-type]
    await sending
    assert handoff.state == "granted"
    assert pair.sender.outcomes == {"sent_again": 2}


async def test_a_tensor_that_never_comes_undamaged_is_given_up(pair: Pair) -> None:
    handoff = await pair.granted(make_offer())
    delivering = asyncio.create_task(pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA))
    for _ in range(MAX_SENDS):
        await pair.tensors.receive()
        pair.sender.handle(delivery(Receipt("r", 0, 0, "corrupt")))
    with pytest.raises(TriptychError, match="undamaged") as caught:
        await delivering
    assert caught.value.info.retryable
    assert pair.sender.num_open == 0
    assert pair.sender.outcomes == {"sent_again": MAX_SENDS - 1, "corrupt": 1}


async def test_an_offer_is_repeated_until_it_is_answered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.02)
    offer = make_offer()
    offering = asyncio.create_task(pair.sender.offer(offer, pair.receiver))
    await eventually(lambda: pair.offers[:3] == [timeless(offer)] * 3)
    pair.sender.handle(delivery(Grant("r", 0, 0, "granted")))
    assert (await offering).state == "granted"


@pytest.mark.parametrize("lost", ["receipt", "tensor"])
async def test_a_lost_receipt_or_tensor_shows_in_the_answer_to_a_repeated_offer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    handoff = await pair.granted(make_offer())
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.02)
    delivering = asyncio.create_task(pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA))
    await pair.tensors.receive()
    await eventually(lambda: pair.sender.outcomes["offer_repeated"] > 0)
    if lost == "receipt":
        pair.sender.handle(delivery(Grant("r", 0, 0, "cached")))
    else:
        pair.sender.handle(delivery(Grant("r", 0, 0, "granted")))
        await pair.tensors.receive()
        pair.sender.handle(delivery(Receipt("r", 0, 0, "stored")))
    await delivering
    assert pair.sender.outcomes["stored"] == 1
    assert pair.sender.outcomes["sent_again"] == (lost == "tensor")


async def test_a_part_whose_receipt_is_lost_is_not_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    handoff = await pair.granted(make_kv_offer())
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.02)
    for number in range(2):
        sending = asyncio.create_task(pair.sender.send(handoff, make_part(4 * number, 4)))
        await pair.tensors.receive()
        repeated = pair.sender.outcomes["offer_repeated"]
        await eventually(lambda: pair.sender.outcomes["offer_repeated"] > repeated)  # noqa: B023
        grant = Grant("r", KV_INPUT_ID, 0, "granted", num_parts=number + 1)
        pair.sender.handle(delivery(grant))
        await sending
        assert handoff.part == number + 1
    assert pair.sender.outcomes["sent_again"] == 0


async def test_a_late_answer_says_nothing_about_a_part_that_was_not_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoff = await pair.granted(make_kv_offer())
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.02)
    sending = asyncio.create_task(pair.sender.send(handoff, make_part(0, 4)))
    await pair.tensors.receive()
    await eventually(lambda: pair.sender.outcomes["offer_repeated"] > 0)
    pair.sender.handle(delivery(Receipt("r", KV_INPUT_ID, 0, "stored")))
    await sending
    handoff.patience_s = 0.0
    pair.sender.handle(delivery(Grant("r", KV_INPUT_ID, 0, "granted", num_parts=1)))
    assert not handoff.receipt.done()
    assert pair.sender.outcomes["duplicate"] == 1


async def test_a_slow_receiver_is_given_twice_as_long_each_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.handoff.sender.REPEAT_S", 0.02)
    handoff = await pair.granted(make_offer())
    loop, waiting = asyncio.get_running_loop(), delivery(Grant("r", 0, 0, "granted"))
    monkeypatch.setattr(pair.sender, "_send_offer", lambda _: loop.call_soon(pair.sender.handle, waiting))
    began_s = time.monotonic()
    with pytest.raises(TriptychError, match="undamaged in 4 attempts"):
        await pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA)
    assert pair.sender.outcomes["sent_again"] == MAX_SENDS - 1
    assert time.monotonic() - began_s >= 0.02 * sum(2**number - 0.5 for number in range(MAX_SENDS))


async def test_the_answer_to_an_old_offer_does_not_send_anything_again(pair: Pair) -> None:
    handoff = await pair.granted(make_offer())
    delivering = asyncio.create_task(pair.sender.deliver(handoff, [4, 8], "bfloat16", DATA))
    await pair.tensors.receive()
    pair.sender.handle(delivery(Grant("r", 0, 0, "granted")))
    pair.sender.handle(delivery(Receipt("r", 0, 0, "stored")))
    await delivering
    assert pair.sender.outcomes == {"duplicate": 1, "stored": 1}


async def test_a_grant_taken_back_while_a_part_is_on_its_way_ends_the_wait(pair: Pair) -> None:
    handoff = await pair.granted(make_kv_offer())
    sending = asyncio.create_task(pair.sender.send(handoff, make_part(0, 8)))
    await pair.tensors.receive()
    pair.sender.handle(delivery(Grant("r", KV_INPUT_ID, 0, "cancelled")))
    with pytest.raises(TriptychError, match="took its grant back"):
        await sending


async def test_a_handoff_can_be_ended_from_this_side(pair: Pair) -> None:
    offering = asyncio.create_task(pair.sender.offer(make_kv_offer(), pair.receiver))
    await eventually(lambda: pair.sender.num_open == 1)
    pair.sender.fail(("r", KV_INPUT_ID, 0), TriptychError("internal_error", "the engine gave it up"))
    with pytest.raises(TriptychError, match="gave it up"):
        await offering
    assert pair.sender.num_open == 0
