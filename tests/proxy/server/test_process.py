"""The proxy as a process: it starts, serves, stops by a signal, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from broker.cluster.registry import Registry
from common.messages import InstanceRecord
from tests.proxy.conftest import eventually

CODE = """
import signal, sys
from common.config import Settings
from proxy.app import run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup, which a proxy respects
code = run(Settings(model="signpost", broker=sys.argv[1], cluster=sys.argv[2], port=int(sys.argv[3])))
loaded = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else code)
"""


@asynccontextmanager
async def _started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a proxy as a process for the length of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _errors_of(process: asyncio.subprocess.Process, exit_status: int, within_s: float = 30) -> str:
    """Return the standard error of a process that ends with this status."""
    _, errors = await asyncio.wait_for(process.communicate(), within_s)
    assert process.returncode == exit_status, errors.decode()
    return errors.decode()


async def _registered(registry: Registry) -> InstanceRecord:
    """Return the only entry of a registry once there is one."""

    async def is_there() -> bool:
        return bool(await registry.instances())

    await eventually(is_there, timeout_s=30)
    (record,) = (await registry.instances()).values()
    return record


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_proxy_registers_serves_and_stops_cleanly_by_a_signal(number, broker_url, redis):
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    async with _started(broker_url, cluster, "0") as process:
        record = await _registered(Registry(redis, cluster))
        assert record.role == "proxy"
        async with httpx.AsyncClient(base_url=f"http://{record.http_address}") as http:
            assert (await http.get("/health")).status_code == 200
            process.send_signal(signal.SIGUSR1)  # dumps all stacks, and goes on
            assert "no decoder" in (await http.get("/ready")).text
        process.send_signal(number)
        errors = await _errors_of(process, 0, within_s=10)
        assert "Current thread" in errors
        assert "in WorkerPool." in errors
        assert await redis.keys(f"{cluster}*") == []


async def test_a_proxy_whose_id_another_process_has_taken_ends_and_says_so(broker_url, redis):
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    registry = Registry(redis, cluster)
    async with _started(broker_url, cluster, "0") as process:
        record = await _registered(registry)
        await registry.register(msgspec.structs.replace(record, epoch=record.epoch + 1))

        async def ended() -> bool:
            entry = await registry.get(record.instance_id)
            if entry is not None and entry.epoch == record.epoch:
                await registry.heartbeat()  # it had just looked: another process enters itself again, too
            await redis.persist(f"{cluster}:instance:{record.instance_id}")  # however slow the machine is
            return process.returncode is not None

        await eventually(ended, timeout_s=15)
        errors = await _errors_of(process, 1, within_s=15)
        assert f"has taken the instance id '{record.instance_id}'" in errors
        assert await registry.get(record.instance_id) is not None, "the entry is the other's"
    await registry.unregister()


async def test_a_broker_url_that_is_none_ends_the_process_with_a_hint():
    async with _started("localhost:6379", "nobody", "0") as process:
        assert "try redis://" in await _errors_of(process, 1)


async def test_a_broker_that_does_not_let_it_in_ends_the_process_with_a_hint(broker_url):
    parts = urlsplit(broker_url)
    async with _started(f"redis://:wrong@{parts.hostname}:{parts.port}", "nobody", "0") as process:
        errors = await _errors_of(process, 1)
        assert "does not let us in" in errors
        assert "does the broker's URL hold its password?" in errors


async def test_a_taken_port_is_said_and_ends_the_process(broker_url):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with _started(broker_url, "nobody", port) as process:
            assert f"cannot listen on 127.0.0.1:{port}" in await _errors_of(process, 1)
