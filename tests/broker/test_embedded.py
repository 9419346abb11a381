"""The embedded broker: comes up from anywhere, leaves nothing, and never outlives us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
import redis

from broker import embedded
from broker.embedded import EmbeddedBroker
from common.errors import TriptychError
from tests.launch.waiting import alive, eventually


def test_it_serves_between_start_and_stop() -> None:
    broker = EmbeddedBroker()
    client = redis.Redis.from_url(broker.start())
    assert client.ping()
    pid = broker.pid
    assert pid is not None
    broker.stop()
    assert not alive(pid)
    broker.stop()  # a second stop is harmless


def test_one_that_was_killed_starts_again_empty_where_it_was() -> None:
    broker = EmbeddedBroker()
    url = broker.start()
    with pytest.raises(TriptychError, match="has ended"):
        broker.restart()
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")
    first = broker.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not alive(first), 5, "the end of the process")
    while broker.running:  # until its owner has noticed, too
        threading.Event().wait(0.01)
    broker.restart()
    second = broker.pid
    assert second is not None
    assert second != first
    with redis.Redis.from_url(url) as client:
        assert client.keys() == []
    broker.stop()
    assert not alive(second)


def test_it_outlives_the_thread_that_started_it() -> None:
    broker = EmbeddedBroker()
    urls: list[str] = []
    starter = threading.Thread(target=lambda: urls.append(broker.start()))
    starter.start()
    starter.join()
    assert redis.Redis.from_url(urls[0]).ping()
    broker.stop()


async def test_it_starts_from_an_asyncio_program() -> None:
    broker = EmbeddedBroker()
    url = await asyncio.to_thread(broker.start)
    assert await asyncio.to_thread(redis.Redis.from_url(url).ping)
    await asyncio.to_thread(broker.stop)


def test_it_dies_with_a_killed_parent() -> None:
    program = (
        "from broker.embedded import EmbeddedBroker; import threading; b = EmbeddedBroker(); b.start(); "
        "print(b.pid, flush=True); threading.Event().wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not alive(pid), 5, "the end of the process")


def test_a_server_that_does_not_come_up_is_reported_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_CONFIG", "no-such-directive {host} {port}\n")
    with pytest.raises(TriptychError, match="no-such-directive"):
        EmbeddedBroker().start(timeout_s=5)


def test_it_keeps_nothing_on_disk() -> None:
    with EmbeddedBroker() as url:
        client = redis.Redis.from_url(url)
        for command in ("SAVE", "BGSAVE"):
            with pytest.raises(redis.ResponseError, match="unknown command"):
                client.execute_command(command)
