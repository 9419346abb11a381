"""A real encoder worker, a real prefill-decode worker and a real broker: the handoff between processes.

One cluster serves all tests of this file in order; each leaves it idle, and the last one stops it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import zmq
import zmq.asyncio
from redis.asyncio import Redis

from broker.cluster.redis_client import connect
from broker.handoff.channels import FIELD, stream_key
from broker.transports.tensors import addresses_by_scheme
from common.messages import Abort, Encode, Encoded, InstanceRecord, Offer, TensorHeader, encode
from engine.processors import init_worker, process
from services.process.handoff_trace import hop_latencies
from tests.eventually import eventually
from tests.services.cluster import START_S, Cluster, Proxy, about_pictures, cluster, encode_order, sign

pytestmark = pytest.mark.cluster
COLOUR = "What colour is the sign?"


@pytest.fixture(scope="module")
def running_cluster(broker_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(broker_url, tmp_path_factory.mktemp("logs"), {"e0": "encoder", "d0": "prefill_decode"}) as started:
        yield started


@pytest.fixture
async def proxy(running_cluster: Cluster) -> AsyncIterator[Proxy]:
    proxy = Proxy(running_cluster)
    yield proxy
    await eventually(proxy.is_idle, 10.0)
    await proxy.close()
    lengths = running_cluster.stream_lengths()
    assert len(lengths) == 3
    assert not any(lengths.values()), lengths


@pytest.fixture
async def client(broker_url: str) -> AsyncIterator[Redis]:
    client = connect(broker_url)
    yield client
    await client.aclose()


async def ask(proxy: Proxy, request_id: str, colour: str, mark: int = 0) -> bool:
    """Ask for the colour of a picture; True if the answer is right. The text around it is the model's business."""
    media = sign(colour, mark=mark)
    await proxy.send("d0", about_pictures(request_id, [media], COLOUR))
    await proxy.send("e0", encode_order(request_id, 0, media))
    return (await proxy.answer(request_id)).startswith(colour)


async def test_a_picture_is_answered_and_every_stage_tells_its_time(proxy: Proxy) -> None:
    assert await proxy.status("e0", "/ready") == await proxy.status("d0", "/ready") == 200
    assert await ask(proxy, "first", "red")
    assert await ask(proxy, "second", "blue")
    reply = await proxy.encoded("first")
    assert reply.error is None
    assert [span.stage for span in reply.spans] == ["preprocess", "grant", "encode", "handoff"]
    assert {"queue", "inputs", "prefill", "decode"} <= {span.stage for span in proxy.tokens("first")[-1].spans}
    decoder, encoder = await proxy.metrics("d0"), await proxy.metrics("e0")
    assert decoder["triptych_encoder_computations"] == 0
    assert decoder["triptych_integrity_failures"] == 0
    assert decoder["triptych_handoffs_total{outcome=granted}"] == 2
    assert encoder["triptych_handoffs_total{outcome=stored}"] == 2
    assert encoder["triptych_encoder_batch_items_count"] == 2
    assert encoder["triptych_tensors_sent_total{outcome=shm+unix}"] == 2
    detours = ("handoffs_total{outcome=offer_repeated}", "handoffs_total{outcome=sent_again}", "tensor_fallbacks_total")
    assert not [name for name in encoder if name.startswith(tuple(f"triptych_{detour}" for detour in detours))]


async def test_hops_are_told_one_by_one(proxy: Proxy) -> None:
    assert await ask(proxy, "hops", "green")
    async with httpx.AsyncClient() as http:
        sides = [(await http.get(f"{r.http_address}/debug/handoffs")).json() for r in proxy.records.values()]
    latencies = hop_latencies(sides)
    assert all(latencies.values()), latencies
    assert all(seconds > -0.001 for values in latencies.values() for seconds in values)


async def test_content_that_is_there_already_is_not_encoded_again(proxy: Proxy) -> None:
    before = await proxy.metrics("e0")
    assert await ask(proxy, "again", "red")
    reply = await proxy.encoded("again")
    assert "encode" not in [span.stage for span in reply.spans]
    after = await proxy.metrics("e0")
    assert after["triptych_encoder_items_total"] == before["triptych_encoder_items_total"]


async def test_an_offer_may_come_before_its_request(proxy: Proxy) -> None:
    media = sign("orange", mark=1)
    await proxy.send("e0", encode_order("early", 0, media))
    await eventually(lambda: _offers_received(proxy), 10.0)
    await proxy.send("d0", about_pictures("early", [media], COLOUR))
    assert (await proxy.answer("early")).startswith("orange")


async def _offers_received(proxy: Proxy) -> bool:
    return (await proxy.metrics("e0"))["triptych_handoffs_open"] > 0


async def test_an_abort_in_the_middle_frees_everything(proxy: Proxy) -> None:
    media = [sign(colour, size=196 + 28 * n) for n, colour in enumerate(("red", "blue", "green", "purple"))]
    for number in range(4):
        request_id = f"abort-{number}"
        await proxy.send("d0", about_pictures(request_id, media, COLOUR, max_tokens=64))
        for input_id, item in enumerate(media):
            await proxy.send("e0", encode_order(request_id, input_id, item))
    await eventually(lambda: any(isinstance(answer, Encoded) for answer in proxy.answers))
    for number in range(4):
        for instance_id in ("e0", "d0"):
            await proxy.send(instance_id, Abort(f"abort-{number}"))
    await eventually(proxy.is_idle, 2.0)


async def test_repeated_messages_are_harmless(proxy: Proxy, running_cluster: Cluster, client: Redis) -> None:
    media = sign("yellow", mark=2)
    generate, encoding = about_pictures("twice", [media], COLOUR), encode_order("twice", 0, media)
    offer = _offer_of(encoding)
    await proxy.send("d0", generate, generate)
    await proxy.send("e0", encoding, encoding, encoding)
    stream = stream_key(running_cluster.name, "d0", "metadata")
    for _ in range(2):
        await client.xadd(stream, {FIELD: encode(offer)})
    await proxy.send("d0", generate)
    assert (await proxy.answer("twice")).startswith("yellow")
    offsets = [message.offset for message in proxy.tokens("twice")]
    assert offsets == sorted(set(offsets))
    await proxy.send("e0", encoding)
    await eventually(lambda: len(proxy.of("twice", Encoded)) >= 2)  # the reply comes again
    assert all(reply.error is None for reply in proxy.of("twice", Encoded))
    await proxy.send("d0", Abort("twice"))
    await proxy.send("e0", Abort("twice"))


def _offer_of(message: Encode) -> Offer:
    """The offer that the encoder itself makes of an item."""
    init_worker("signpost", "float32")
    item = process(message.kind, message.media)
    key = (message.request_id, message.input_id, message.attempt)
    shape = list(item.shape)
    return Offer(
        *key,
        message.content_hash,
        message.kind,
        shape,
        item.dtype,
        item.size_bytes,
        item.layout,
        "e0",
        time.monotonic() + 5,
    )


async def test_bad_media_are_reported_and_leave_nothing(proxy: Proxy) -> None:
    await proxy.send("e0", encode_order("bad", 0, b"no picture at all"))
    reply = await proxy.encoded("bad")
    assert reply.error is not None
    assert reply.error.code == "bad_media"


async def test_a_destination_that_does_not_exist_is_unavailable(proxy: Proxy) -> None:
    await proxy.send("e0", encode_order("lost", 0, sign("red"), to="d7"))
    reply = await proxy.encoded("lost")
    assert reply.error is not None
    assert reply.error.code == "unavailable"


async def test_each_role_says_what_it_does_not_do(proxy: Proxy) -> None:
    await proxy.send("d0", encode_order("wrong", 0, sign("red")))
    reply = await proxy.encoded("wrong")
    assert reply.error is not None
    assert reply.error.message == "d0 is a prefill_decode worker: it has no encoder"


async def test_hostile_bytes_on_every_socket_change_nothing(
    proxy: Proxy, running_cluster: Cluster, client: Redis
) -> None:
    header = TensorHeader("ghost", 0, 0, "e0", 1, [4, 4], "float32", 64)
    context = zmq.asyncio.Context()
    for record in running_cluster.records.values():
        for address in (record.requests_address, *addresses_by_scheme(record.tensor_address).values()):
            if not address.startswith("tcp://"):
                continue
            raw = context.socket(zmq.DEALER)
            raw.connect(address)
            for frames in ([os.urandom(64)], [b"", b"", b""], [encode(header), os.urandom(64)], [encode(header), b""]):
                await raw.send_multipart(frames)
            with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as stranger:
                stranger.sendall(os.urandom(2048))
        with socket.create_connection(("127.0.0.1", int(record.http_address.rsplit(":", 1)[1]))) as stranger:
            stranger.sendall(os.urandom(2048))
    for instance_id, channel in (("d0", "metadata"), ("e0", "allocated"), ("e0", "injected")):
        stream = stream_key(running_cluster.name, instance_id, channel)  # type: ignore[arg-type]
        await client.xadd(stream, {FIELD: os.urandom(100)})
        await client.xadd(stream, {"something": "else"})
    assert await ask(proxy, "after the storm", "red", mark=3)
    assert await proxy.status("e0", "/health") == await proxy.status("d0", "/health") == 200
    context.destroy(linger=0)


@pytest.mark.timeout(300)
async def test_an_idle_encoder_becomes_a_decoder_worker_and_an_encoder_again(running_cluster: Cluster) -> None:
    process = running_cluster.processes["e0"]
    for role in ("prefill_decode", "encoder"):
        former = running_cluster.records["e0"]
        async with httpx.AsyncClient() as http:
            reply = await http.post(f"{former.http_address}/switch", json={"role": role})
        assert reply.status_code == 202
        await eventually(lambda: _is_younger(running_cluster.record("e0"), former), START_S)  # noqa: B023
        record = running_cluster.record("e0")
        assert record is not None
        assert (record.role, record.draining) == (role, False)
        assert process.poll() is None
        running_cluster.records["e0"] = record
        proxy = Proxy(running_cluster)
        if role == "prefill_decode":
            await proxy.send("e0", about_pictures("text", [], "Which colours are there?"))
            assert await proxy.answer("text")
        else:
            assert await ask(proxy, "picture", "green", mark=5)
        await proxy.close()
    assert _zombies(process.pid) == []


def _zombies(parent_pid: int) -> list[str]:
    """The ended children of a process that it has not noticed, as /proc tells of them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            name, _, rest = path.read_text().rpartition(")")
            state, parent, *_ = rest.split()
            if (state, int(parent)) == ("Z", parent_pid):
                found.append(name)
    return found


def _is_younger(record: InstanceRecord | None, former: InstanceRecord) -> bool:
    return record is not None and record.epoch > former.epoch


async def test_a_flushed_broker_is_forgiven(proxy: Proxy, client: Redis) -> None:
    await client.flushall()
    assert await ask(proxy, "flushed", "blue", mark=4)


async def test_a_signal_dumps_the_stacks_of_each_into_its_log(running_cluster: Cluster) -> None:
    def is_told(instance_id: str) -> bool:
        log = running_cluster.logs[instance_id].read_text()
        return all(part in log for part in ("Current thread", "engine_thread.py", "in WorkerProcess._beat"))

    for instance_id, worker in running_cluster.processes.items():
        worker.send_signal(signal.SIGUSR1)
        await eventually(partial(is_told, instance_id))
        assert worker.poll() is None


async def test_they_stop_quickly_and_leave_nothing(running_cluster: Cluster) -> None:
    statuses, seconds = running_cluster.stop()
    assert statuses == [0, 0]
    assert seconds < 4.0  # two at once on a loaded machine; each takes well under a second alone
    assert running_cluster.keys() == []
