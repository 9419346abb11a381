"""The embedded broker: comes up from anywhere, leaves nothing, and never outlives us."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from broker.cluster import embedded
from broker.cluster.embedded import EmbeddedBroker
from common.errors import TriptychError
from tests.launch.waiting import alive, eventually


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker that is not started; it is stopped after the test."""
    broker = EmbeddedBroker()
    yield broker
    broker.stop()


def test_it_serves_between_start_and_stop(broker: EmbeddedBroker) -> None:
    client = redis.Redis.from_url(broker.start())
    assert client.ping()
    pid = broker.pid
    assert pid is not None
    broker.stop()
    assert not alive(pid)
    broker.stop()  # a second stop is harmless


def test_one_that_was_killed_starts_again_empty_where_it_was(broker: EmbeddedBroker) -> None:
    url = broker.start()
    with pytest.raises(TriptychError, match="has ended"):
        broker.restart()
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")
    first = broker.pid
    assert first is not None
    kill(broker)
    broker.restart()
    second = broker.pid
    assert second is not None
    assert second != first
    with redis.Redis.from_url(url) as client:
        assert client.keys() == []
    broker.stop()
    assert not alive(second)


def kill(broker: EmbeddedBroker) -> None:
    """Return once its owner has noticed, too."""
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    eventually(lambda: not broker.running, 10, "the end of the process")


def slow_server(folder: Path, first_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a server program from now on that needs so long at its first start, and writes what pid it has then."""
    program, pid_file = folder / "server", folder / "pid"
    program.write_text(
        f"#!{sys.executable} -IS\nimport os, pathlib, sys, time\npid_file = pathlib.Path({str(pid_file)!r})\n"
        f"if not pid_file.exists():\n    new = pid_file.with_suffix('.new')\n    new.write_text(str(os.getpid()))\n"
        f"    new.rename(pid_file)\n    time.sleep({first_s})\n"
        f"os.execv({embedded.find_server()!r}, sys.argv)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: str(program))


def test_while_its_port_is_anothers_it_does_not_come_back_and_may_be_started_again_later(
    broker: EmbeddedBroker,
) -> None:
    url = broker.start()
    kill(broker)
    with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
        for _ in range(2):
            with pytest.raises(TriptychError, match=r"(?s)ended before it was ready:.*Address already in use"):
                broker.restart()
            assert not broker.running
    broker.restart()
    assert redis.Redis.from_url(url).ping()


def test_a_server_that_is_too_slow_is_ended_and_may_be_started_again(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = broker.start()
    kill(broker)
    slow_server(tmp_path, 60.0, monkeypatch)
    with pytest.raises(TriptychError, match="did not come up within 3 s"):
        broker.restart(timeout_s=3)
    assert not broker.running
    assert not alive(int((tmp_path / "pid").read_text()))
    broker.restart(timeout_s=60)
    assert redis.Redis.from_url(url).ping()


def test_where_there_can_be_no_thread_for_it_that_is_said_and_it_may_be_started_again_later(
    broker: EmbeddedBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    url = broker.start()
    kill(broker)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(TriptychError, match="cannot be started: can't start new thread"):
                broker.restart()
    broker.restart()
    with redis.Redis.from_url(url) as client:
        assert client.ping()


def test_a_stop_ends_a_start_that_is_under_way(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.start()
    kill(broker)
    slow_server(tmp_path, 60.0, monkeypatch)
    errors: list[BaseException] = []

    def restart() -> None:
        try:
            broker.restart(timeout_s=60)
        except TriptychError as error:
            errors.append(error)

    restarting = threading.Thread(target=restart)
    restarting.start()
    eventually(lambda: broker.running and (tmp_path / "pid").exists(), 20, "a start that is under way")
    began_s = time.monotonic()
    broker.stop()
    restarting.join(20)
    assert errors
    assert time.monotonic() - began_s < 20
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(TriptychError, match="has ended"):
        broker.restart()


def test_it_outlives_the_thread_that_started_it(broker: EmbeddedBroker) -> None:
    urls: list[str] = []
    starter = threading.Thread(target=lambda: urls.append(broker.start()))
    starter.start()
    starter.join()
    assert redis.Redis.from_url(urls[0]).ping()


async def test_it_starts_from_an_asyncio_program(broker: EmbeddedBroker) -> None:
    url = await asyncio.to_thread(broker.start)
    assert await asyncio.to_thread(redis.Redis.from_url(url).ping)
    await asyncio.to_thread(broker.stop)


def test_it_dies_with_a_killed_parent() -> None:
    program = (
        "from broker.cluster.embedded import EmbeddedBroker; import threading; b = EmbeddedBroker(); b.start(); "
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
