"""Connections that say nothing, more than a worker has descriptors for: who is in stays in, others get in later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from broker.cluster.rpc import WorkerClient
from common.errors import ErrorInfo
from common.keys import ClusterKey
from common.messages import Abort, Failed
from services.process.addresses import FEW_DESCRIPTORS, warn_of_few_descriptors
from tests.eventually import eventually
from tests.worker_client import worker_client

LIMIT = 200
SERVER = f"""
import asyncio, resource, sys
from broker.cluster.curve import ClusterContext
from broker.cluster.rpc import WorkerServer
from common.errors import ErrorInfo
from common.keys import ClusterKey
from common.messages import Failed

async def serve():
    server = WorkerServer(ClusterContext(ClusterKey(sys.stdin.readline())))
    print(server.address, flush=True)
    while True:
        proxy, message = await server.receive()
        server.send(proxy, Failed(message.request_id, ErrorInfo("unavailable", "heard")))

resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
asyncio.run(serve())
"""


@asynccontextmanager
async def worker(key: ClusterKey) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process with few descriptors that answers every request, and its address."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{key.reveal()}\n".encode())
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def is_heard(client: WorkerClient) -> None:
    async with asyncio.timeout(20):
        client.send(Abort("r"))
        assert await client.receive() == Failed("r", ErrorInfo("unavailable", "heard"))


async def test_who_takes_all_descriptors_of_a_worker_neither_ends_it_nor_cuts_off_its_members(make_context, key):
    async with worker(key) as (process, address), worker_client(make_context(key), address, "early") as member:
        await is_heard(member)
        with contextlib.ExitStack() as strangers:
            for _ in range(2 * LIMIT):
                stranger = strangers.enter_context(socket.socket())
                stranger.setblocking(False)
                stranger.connect_ex((urlsplit(address).hostname, urlsplit(address).port))
            await eventually(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) == LIMIT)
            await is_heard(member)
        async with worker_client(make_context(key), address, "late") as newcomer:
            await is_heard(newcomer)
        await is_heard(member)
        assert process.returncode is None


@pytest.mark.parametrize(
    ("host", "limit", "warns"),
    [
        ("0.0.0.0", FEW_DESCRIPTORS - 1, True),
        ("0.0.0.0", FEW_DESCRIPTORS, False),
        ("0.0.0.0", resource.RLIM_INFINITY, False),
        ("127.0.0.1", FEW_DESCRIPTORS - 1, False),
    ],
)
def test_a_worker_that_others_reach_warns_of_few_descriptors(monkeypatch, host, limit, warns):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with capture_logs() as logs:
        warn_of_few_descriptors(host)
    assert [entry["limit"] for entry in logs] == [limit] * warns
