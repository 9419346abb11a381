"""The proxy as a process: it starts, serves, stops by a signal, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import uuid
from urllib.parse import urlsplit

import httpx
import msgspec

from broker.cluster.registry import Registry
from tests.proxy.conftest import eventually

CODE = """
import sys
from common.config import Settings
from proxy.app import run
code = run(Settings(model="signpost", broker=sys.argv[1], cluster=sys.argv[2], port=int(sys.argv[3])))
loaded = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else code)
"""


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def test_a_proxy_registers_serves_and_stops_cleanly_by_a_signal(broker_url, redis):
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    process = await _start(broker_url, cluster, "0")
    try:
        registry = Registry(redis, cluster)

        async def registered() -> bool:
            return bool(await registry.instances())

        await eventually(registered, timeout_s=30)
        (record,) = (await registry.instances()).values()
        assert record.role == "proxy"
        async with httpx.AsyncClient(base_url=f"http://{record.http_address}") as http:
            assert (await http.get("/health")).status_code == 200
            process.send_signal(signal.SIGUSR1)  # dumps all stacks, and goes on
            assert "no decoder" in (await http.get("/ready")).text
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, errors.decode()
        assert b"Current thread" in errors
        assert b"in WorkerPool." in errors
        assert await redis.keys(f"{cluster}*") == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_proxy_whose_id_another_process_has_taken_ends_and_says_so(broker_url, redis):
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    process = await _start(broker_url, cluster, "0")
    registry = Registry(redis, cluster)
    try:

        async def registered() -> bool:
            return bool(await registry.instances())

        await eventually(registered, timeout_s=30)
        (record,) = (await registry.instances()).values()
        await registry.register(msgspec.structs.replace(record, epoch=record.epoch + 1))

        async def ended() -> bool:
            entry = await registry.get(record.instance_id)
            if entry is not None and entry.epoch == record.epoch:
                await registry.heartbeat()  # it had just looked: another process enters itself again, too
            await redis.persist(f"{cluster}:instance:{record.instance_id}")  # however slow the machine is
            return process.returncode is not None

        await eventually(ended, timeout_s=15)
        _, errors = await asyncio.wait_for(process.communicate(), 15)
        assert process.returncode == 1
        assert f"has taken the instance id '{record.instance_id}'" in errors.decode()
        assert await registry.get(record.instance_id) is not None, "the entry is the other's"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await registry.unregister()


async def test_a_broker_url_that_is_none_ends_the_process_with_a_hint():
    process = await _start("localhost:6379", "nobody", "0")
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "try redis://" in errors.decode()


async def test_a_broker_that_does_not_let_it_in_ends_the_process_with_a_hint(broker_url):
    parts = urlsplit(broker_url)
    process = await _start(f"redis://:wrong@{parts.hostname}:{parts.port}", "nobody", "0")
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "does not let us in" in errors.decode()
    assert "does the broker's URL hold its password?" in errors.decode()


async def test_a_taken_port_is_said_and_ends_the_process(broker_url):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await _start(broker_url, "nobody", port)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()
