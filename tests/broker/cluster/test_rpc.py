"""Requests and token streams over ZMQ: any number of proxies, hostile bytes, peers that come and go."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import pytest
import zmq
import zmq.asyncio

from broker.cluster.curve import ClusterContext
from broker.cluster.rpc import (
    MAX_FROM_WORKER_BYTES,
    MAX_TO_WORKER_BYTES,
    WorkerClient,
    WorkerServer,
    connection_id,
    supersedes,
)
from common.errors import ErrorInfo, TriptychError
from common.messages import (
    Abort,
    Encode,
    Encoded,
    Failed,
    FromWorker,
    Generate,
    Heartbeat,
    Prefilled,
    TokenLogprob,
    Tokens,
    encode,
)
from common.process.ports import free_port
from common.sampling_params import SamplingParams
from tests.broker.conftest import running
from tests.deadlines import timeless
from tests.eventually import eventually
from tests.worker_client import worker_client


def generate(request_id: str) -> Generate:
    return Generate(request_id, [1, 2, 3], [], SamplingParams())


@pytest.fixture
def server(zmq_context: zmq.asyncio.Context) -> Iterator[WorkerServer]:
    server = WorkerServer(zmq_context)
    yield server
    server.close()


async def test_each_proxy_gets_the_answers_to_its_own_requests(
    server: WorkerServer, zmq_context: zmq.asyncio.Context
) -> None:
    clients = {name: WorkerClient(zmq_context, server.address, name) for name in ("p0", "p1")}
    for name, client in clients.items():
        client.send(generate(f"request of {name}"))
    for _ in clients:
        proxy, message = await server.receive()
        assert isinstance(message, Generate)
        assert message.request_id == f"request of {proxy.decode()}"
        for offset in range(3):
            assert server.send(proxy, Tokens(message.request_id, offset, [offset])) == ["sent"]
    for name, client in clients.items():
        for offset in range(3):
            assert await client.receive() == Tokens(f"request of {name}", offset, [offset])
        client.close()


async def test_media_of_many_megabytes_pass(server: WorkerServer, zmq_context: zmq.asyncio.Context) -> None:
    media = os.urandom(32 * 2**20)
    async with worker_client(zmq_context, server.address, "p") as client:
        client.send(Encode("r", 0, 0, "image", "hash", media, "d0", time.monotonic()))
        _, message = await server.receive()
    assert isinstance(message, Encode)
    assert message.media == media


async def test_a_request_that_is_too_large_is_not_sent_and_costs_nobody_else_anything(
    server: WorkerServer, zmq_context: zmq.asyncio.Context
) -> None:
    """The largest one arrives; with a byte more the connection would be closed."""
    small = Encode("r", 0, 0, "image", "hash", bytes(2**16), "d0", time.monotonic())
    largest = msgspec.structs.replace(small, media=bytes(MAX_TO_WORKER_BYTES - len(encode(small)) + 2**16))
    assert len(encode(largest)) == MAX_TO_WORKER_BYTES
    async with worker_client(zmq_context, server.address, "p") as client, asyncio.timeout(20):
        assert await client.opened()
        client.send(generate("before"))
        assert (await server.receive())[1] == generate("before")
        too_large = msgspec.structs.replace(largest, media=largest.media + b"x")
        with pytest.raises(
            TriptychError, match=f"Encode message has {MAX_TO_WORKER_BYTES + 1} bytes, 1 more"
        ) as caught:
            client.send(too_large)
        assert caught.value.info.code == "item_too_large"
        assert not caught.value.info.retryable
        client.send(generate("after"))
        proxy, message = await server.receive()
        assert message == generate("after")
        assert server.send(proxy, Tokens("before", 0, [1])) == ["sent"]
        assert await client.receive() == Tokens("before", 0, [1])
        client.send(largest)
        assert timeless((await server.receive())[1]) == timeless(largest)
        assert not await client._monitor.poll(0)  # nothing was lost


async def test_messages_that_are_sent_together_arrive_in_order_without_those_that_are_none(
    server: WorkerServer, zmq_context: zmq.asyncio.Context
) -> None:
    invalid: list[None] = []
    together = [Tokens(name, 0, [place]) for place, name in enumerate("abc")]
    async with worker_client(zmq_context, server.address, "p", lambda: invalid.append(None)) as client:
        client.send(Heartbeat())
        proxy, _ = await server.receive()
        assert server.send(proxy, *together, Heartbeat()) == ["sent"] * 4
        frames = [encode(message) for message in together]
        await server._socket.send_multipart([proxy, frames[0], b"junk", frames[1], b"", frames[2]])
        async with asyncio.timeout(5):
            assert [await client.receive() for _ in range(6)] == 2 * together
    assert len(invalid) == 2


LAGGING: Final = """
import asyncio
import zmq.asyncio
from broker.cluster import rpc
from common.messages import Heartbeat, Tokens

set_options = rpc._set_common_options

def with_fast_heartbeats(socket):
    set_options(socket)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 100)

async def main():
    rpc._set_common_options = with_fast_heartbeats
    context, of_worker = zmq.asyncio.Context(), zmq.asyncio.Context()
    server = rpc.WorkerServer(of_worker)
    client = rpc.WorkerClient(context, server.address, "p")
    client.send(Heartbeat())
    proxy, _ = await server.receive()
    for number in range(150_000):
        while server.send(proxy, Tokens("r", number, [1])) == ["gone"]:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.5)
    server.close()
    of_worker.term()
    await asyncio.sleep(1)
    print([(await client.receive()).offset for _ in range(3)])

asyncio.run(main())
"""


async def test_a_proxy_that_lags_far_behind_survives_the_death_of_a_worker() -> None:
    """A full queue of received messages, a lost connection and a heartbeat of libzmq would end the process."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LAGGING, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (said, process.returncode) == (b"[0, 1, 2]\n", 0)


LARGE = [TokenLogprob(1, -0.5, 1)] * (MAX_FROM_WORKER_BYTES // 16)
SPACE = " " * MAX_FROM_WORKER_BYTES
TOO_LARGE_ANSWERS: list[tuple[FromWorker, Callable[[ErrorInfo], FromWorker]]] = [
    (Tokens("r", 0, [1], prompt_logprobs=[*LARGE], attempt=3), lambda error: Failed("r", error, 3)),
    (Prefilled("r", 3, prompt_logprobs=[*LARGE]), lambda error: Prefilled("r", 3, error)),
    (Encoded("r", 1, 3, ErrorInfo("bad_media", SPACE)), lambda error: Encoded("r", 1, 3, error)),
    (Failed("r", ErrorInfo("unavailable", SPACE), 3), lambda error: Failed("r", error, 3)),
]


async def test_an_answer_that_is_too_large_disturbs_none_that_travels_with_it(
    server: WorkerServer, zmq_context: zmq.asyncio.Context
) -> None:
    async with worker_client(zmq_context, server.address, "p") as client, asyncio.timeout(20):
        client.send(Heartbeat())
        proxy, _ = await server.receive()
        before, after = Tokens("a", 0, [1]), Tokens("b", 0, [1])
        assert server.send(proxy, before, TOO_LARGE_ANSWERS[0][0], after) == ["sent", "too_large", "sent"]
        assert server.send(b"never seen", before, TOO_LARGE_ANSWERS[0][0]) == ["gone", "gone"]
        told = [await client.receive() for _ in range(3)]
    assert (told[0], told[2]) == (before, after)
    assert isinstance(told[1], Failed)


@pytest.mark.parametrize(("answer", "refusal"), TOO_LARGE_ANSWERS, ids=lambda one: type(one).__name__)
async def test_an_answer_that_is_too_large_ends_its_request_and_no_other(
    zmq_context: zmq.asyncio.Context, answer: FromWorker, refusal: Callable[[ErrorInfo], FromWorker]
) -> None:
    server = WorkerServer(zmq_context)
    async with worker_client(zmq_context, server.address, "p") as client, asyncio.timeout(20):
        client.send(Heartbeat())
        proxy, _ = await server.receive()
        assert server.send(proxy, Tokens("other", 0, [1])) == ["sent"]
        assert server.send(proxy, answer) == ["too_large"]
        assert server.send(proxy, Tokens("other", 1, [2])) == ["sent"]
        told = [await client.receive() for _ in range(3)]
        assert (told[0], told[2]) == (Tokens("other", 0, [1]), Tokens("other", 1, [2]))
        error = told[1].error  # type: ignore[union-attr]
        assert error is not None
        assert told[1] == refusal(error)
        size = len(encode(answer))
        assert (error.code, error.retryable) == ("item_too_large", False)
        assert (
            f"has {size} bytes, {size - MAX_FROM_WORKER_BYTES} more than the {MAX_FROM_WORKER_BYTES}" in error.message
        )
    server.close()


async def test_a_request_sent_before_the_worker_is_there_arrives(zmq_context: zmq.asyncio.Context) -> None:
    port = free_port("127.0.0.1")
    client = WorkerClient(zmq_context, f"tcp://127.0.0.1:{port}", "p")
    client.send(Heartbeat())
    late = zmq_context.socket(zmq.ROUTER)
    late.bind(f"tcp://127.0.0.1:{port}")
    async with asyncio.timeout(5):
        assert (await late.recv_multipart())[0] == b"p"
    client.close()
    late.close(linger=0)


async def test_another_process_at_a_workers_address_is_told_from_it(zmq_context: zmq.asyncio.Context) -> None:
    server = WorkerServer(zmq_context, life="b@2")
    for life, taken in (("a@1", False), ("b@1", False), ("b@2", True), ("", True)):
        async with worker_client(zmq_context, server.address, "p", life=life) as client, asyncio.timeout(5):
            client.send(Heartbeat())
            proxy, _ = await server.receive()
            server.send(proxy, Tokens("r", 0, [1]))
            if taken:
                assert await client.receive() == Tokens("r", 0, [1])
            else:
                with pytest.raises(TriptychError, match=f"b@2 answers at .*, not {life}"):
                    await client.receive()
    server.close()


async def test_hostile_bytes_are_counted_and_dropped(server: WorkerServer, zmq_context: zmq.asyncio.Context) -> None:
    raw = zmq_context.socket(zmq.DEALER)
    raw.connect(server.address)
    for frames in ([b""], [os.urandom(100)], [b"\x81\xa4type\xa5abort"], [b"a", b"b", b"c"]):
        await raw.send_multipart(frames)
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as stranger:
        stranger.sendall(os.urandom(4096))  # not even ZMQ
    async with worker_client(zmq_context, server.address, "p") as client:
        client.send(Abort("r"))
        seen: list[object] = []

        async def take() -> None:
            while True:
                seen.append((await server.receive())[1])

        async with running(take()):
            await eventually(lambda: bool(seen) and server.num_invalid >= 4)
    assert seen == [Abort("r")]
    raw.close(linger=0)


async def test_sending_to_a_proxy_that_is_gone_says_so(server: WorkerServer, zmq_context: zmq.asyncio.Context) -> None:
    client = WorkerClient(zmq_context, server.address, "p")
    client.send(Heartbeat())
    proxy, _ = await server.receive()
    assert server.send(b"never seen", Tokens("r", 0, [1])) == ["gone"]
    client.close()
    receiving = asyncio.create_task(server.receive())  # ZMQ learns of the goodbye while the socket is being read
    await eventually(lambda: server.send(proxy, Tokens("r", 0, [1])) == ["gone"])
    receiving.cancel()


async def test_a_reconnecting_proxy_takes_over_its_routing_id(zmq_context: zmq.asyncio.Context) -> None:
    server = WorkerServer(zmq_context)
    first = WorkerClient(zmq_context, server.address, "p")
    first.send(Heartbeat())
    await server.receive()
    second = WorkerClient(zmq_context, server.address, "p")
    second.send(Heartbeat())
    proxy, _ = await server.receive()
    assert server.send(proxy, Tokens("r", 0, [1])) == ["sent"]
    async with asyncio.timeout(5):
        assert await second.receive() == Tokens("r", 0, [1])
    for closing in (first, second, server):
        closing.close()


def test_a_later_connection_of_the_same_proxy_supersedes_an_earlier_one() -> None:
    first, second, tenth = (connection_id("proxy.a", 7, number).encode() for number in (1, 2, 10))
    assert supersedes(second, first)
    assert supersedes(tenth, second)
    assert not supersedes(first, first)
    assert not supersedes(first, second)
    assert not supersedes(connection_id("proxy.a", 8, 2).encode(), first), "another process under the same id"
    assert not supersedes(connection_id("proxy.b", 7, 2).encode(), first)
    assert not supersedes(b"\xff", b"")


async def test_a_proxy_may_be_connected_to_thousands_of_workers() -> None:
    with ClusterContext() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(3 * 400)]  # one that has three for each worker
        for opened in sockets:
            opened.close(linger=0)
