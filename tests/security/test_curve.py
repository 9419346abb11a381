"""Sockets between processes: members get through, nobody else does, and strangers cost nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from broker.cluster.curve import ClusterContext, KeyPair, secure_bind, secure_connect
from broker.cluster.rpc import WorkerClient, WorkerServer
from common.errors import ErrorInfo
from common.keys import ClusterKey
from common.messages import MAX_CONTROL_BYTES, Abort, Failed, Heartbeat, encode
from tests.worker_client import worker_client

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


async def refused(context: zmq.asyncio.Context, address: str, **options: bytes | int) -> zmq.asyncio.Socket:
    """A stranger's socket that has tried to speak, once the other side has closed the door."""
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        stranger.setsockopt(getattr(zmq, name), value)
    monitor = stranger.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
    stranger.connect(address)
    stranger.send(encode(Abort("stolen")), flags=zmq.NOBLOCK)
    async with asyncio.timeout(10):
        event = await recv_monitor_message(monitor)
    assert event["event"] & (HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
    stranger.disable_monitor()
    monitor.close(linger=0)
    return stranger


async def test_members_speak_to_each_other(make_context, key):
    server = WorkerServer(make_context(key))
    async with worker_client(make_context(key), server.address, "p") as client, asyncio.timeout(10):
        client.send(Heartbeat())
        proxy, message = await server.receive()
        assert (proxy, message) == (b"p", Heartbeat())
        assert server.send(proxy, Failed("r", ErrorInfo("unavailable", "x"))) == ["sent"]
        assert await client.receive() == Failed("r", ErrorInfo("unavailable", "x"))


async def test_a_message_of_the_largest_size_fits_with_its_encryption(make_context, key):
    server = WorkerServer(make_context(key))
    async with worker_client(make_context(key), server.address, "p") as client, asyncio.timeout(20):
        client.send(Heartbeat())
        proxy, _ = await server.receive()
        overhead = len(encode(of_length(MAX_CONTROL_BYTES))) - MAX_CONTROL_BYTES
        largest = of_length(MAX_CONTROL_BYTES - overhead)
        assert len(encode(largest)) == MAX_CONTROL_BYTES
        assert server.send(proxy, largest) == ["sent"]
        assert await client.receive() == largest


def of_length(num_bytes: int) -> Failed:
    return Failed("r", ErrorInfo("unavailable", "x" * num_bytes))


async def test_strangers_get_nothing(make_context, key):
    """Without CURVE, with another cluster's key, with our listener's public key but not our own client's."""
    server = WorkerServer(make_context(key))
    plain = zmq.asyncio.Context()
    public, secret = zmq.curve_keypair()
    foreign = KeyPair.of(ClusterKey.generate(), "curve server")
    ours = KeyPair.of(key, "curve server")
    strangers = [
        await refused(plain, server.address),
        await refused(
            plain, server.address, CURVE_SERVERKEY=foreign.public, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=secret
        ),
        await refused(
            plain, server.address, CURVE_SERVERKEY=ours.public, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=secret
        ),
    ]
    async with worker_client(make_context(key), server.address, "member") as client, asyncio.timeout(10):
        client.send(Heartbeat())
        assert await server.receive() == (b"member", Heartbeat())  # the first thing that ever came in
    assert server.num_invalid == 0
    for stranger in strangers:
        assert not await stranger.poll(0)
    plain.destroy(linger=0)


async def test_a_member_does_not_speak_to_a_listener_without_the_key(make_context, key):
    plain = zmq.asyncio.Context()
    listener = plain.socket(zmq.ROUTER)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    monitor = listener.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
    async with worker_client(make_context(key), f"tcp://127.0.0.1:{port}", "p") as client, asyncio.timeout(10):
        client.send(Heartbeat())
        await recv_monitor_message(monitor)
        assert not await listener.poll(0)
    listener.disable_monitor()
    plain.destroy(linger=0)


async def test_a_door_without_a_keeper_is_shut(make_context, key):
    """Were the ZAP handler gone, libzmq would let nobody in, rather than everybody."""
    context = make_context(key)
    listener = context.socket(zmq.ROUTER)
    address = secure_bind(listener, "127.0.0.1")
    context._authenticator.stop()
    member = make_context(key)
    stranger = await refused(
        member,
        address,
        CURVE_SERVERKEY=member.server.public,
        CURVE_PUBLICKEY=member.client.public,
        CURVE_SECRETKEY=member.client.secret,
        HANDSHAKE_IVL=300,
    )
    assert not await listener.poll(0)
    stranger.close()


async def test_a_flood_of_garbage_costs_no_memory_and_no_service(make_context, key):
    """Thousands of connections that send noise, or nothing: all are closed, members are served meanwhile."""
    server = WorkerServer(make_context(key))
    host, port = urlsplit(server.address).hostname, urlsplit(server.address).port
    client = WorkerClient(make_context(key), server.address, "member")

    async def wave(count: int) -> None:
        for _ in range(count):
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(os.urandom(256))
        async with asyncio.timeout(20):
            client.send(Heartbeat())
            assert await server.receive() == (b"member", Heartbeat())

    await wave(500)
    before = resident_bytes()
    for _ in range(4):
        await wave(500)
    assert resident_bytes() - before < 8 * 2**20
    client.close()


async def test_a_silent_connection_is_closed(make_context, key, monkeypatch):
    monkeypatch.setattr("broker.cluster.curve.HANDSHAKE_MS", 100)
    server = WorkerServer(make_context(key))
    reader, writer = await asyncio.open_connection(urlsplit(server.address).hostname, urlsplit(server.address).port)
    async with asyncio.timeout(10):
        await reader.read()  # libzmq's greeting, then the end
    writer.close()


def test_the_pairs_of_two_keys_and_of_the_two_ends_differ():
    one, other = ClusterKey.generate(), ClusterKey.generate()
    pairs = {KeyPair.of(key, purpose).public for key in (one, other) for purpose in ("curve server", "curve client")}
    assert len(pairs) == 4
    assert all(len(z85.decode(public)) == 32 for public in pairs)


async def test_without_a_key_sockets_are_plain(make_context):
    context: ClusterContext = make_context(None)
    listener, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    secure_connect(client, secure_bind(listener, "127.0.0.1"))
    assert listener.getsockopt(zmq.MECHANISM) == client.getsockopt(zmq.MECHANISM) == zmq.NULL


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
