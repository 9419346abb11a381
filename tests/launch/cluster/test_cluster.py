"""The life of a local cluster with real processes: start, death and return of a worker, stop with nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from PIL import Image

from broker.cluster.embedded import EmbeddedBroker
from common.process.child_pool import MEDIA_NICENESS
from launch.cli.client import ClientOptions
from launch.cli.request import run_requests
from tests.launch.cli.serving import Serving
from tests.launch.waiting import alive, eventually
from tests.tiny_models import make_llama
from tools.soak.memory import descendants, shared_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Serve = Callable[..., Serving]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[Serving] = []

    def start(*arguments: str) -> Serving:
        started.append(Serving(tmp_path / str(len(started)), *arguments))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def broker_url() -> Iterator[str]:
    with EmbeddedBroker() as url:
        yield url


def ask(base_url: str, picture: Path) -> int:
    options = ClientOptions(base_url, None, max_tokens=8, temperature=0.0, timeout_s=60)
    return run_requests([picture], "Count the circles.", options, parallel=1, repeat=1, live=False, together=False)


def niceness(pid: int) -> set[int]:
    """Return the niceness values of a process's threads."""
    stats = [file.read_text().rpartition(")")[2].split() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {int(fields[16]) for fields in stats}


def refuses_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_cluster_lives_loses_a_worker_and_leaves_nothing(serve: Serve, broker_url: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.new("RGB", (84, 56), "blue").save(picture)
    serving = serve("signpost", "--broker", broker_url, "--cluster", "life")
    serving.wait_until("OpenAI API at")
    assert "ready in" in serving.output
    assert ask(serving.base_url, picture) == 0
    encoder, decoder = serving.pid_of("e0"), serving.pid_of("pd0")
    assert (niceness(encoder), niceness(decoder)) == ({0, MEDIA_NICENESS}, {0})
    assert os.getsid(encoder) == os.getsid(decoder)  # or the kernel would share out cores by session

    shared_memory = shared_files(descendants(serving.process.pid))
    os.kill(serving.pid_of("e0"), signal.SIGKILL)
    serving.wait_until("e0 died (killed by SIGKILL). Its last lines:", 10)
    serving.wait_until("e0 is back")
    assert "starting it again in 0.5 s" in serving.output
    assert alive(serving.pid_of("e0"))
    assert ask(serving.base_url, picture) == 0

    below = descendants(serving.process.pid)
    shared_memory |= shared_files(below)
    serving.interrupt()
    took_s = eventually(lambda: serving.process.poll() is not None, 20, "the end of the cluster")
    assert took_s < 10
    assert serving.process.returncode == 0, serving.output
    assert "killed" not in serving.output.partition("stopping")[2]
    assert [pid for pid in below if alive(pid)] == []
    assert refuses_connections(serving.port)
    assert list(serving.temporary.iterdir()) == []
    assert [path for path in shared_memory if path.exists()] == []
    with redis.Redis.from_url(broker_url) as client:
        assert client.keys("life*") == []


def test_names_that_run_already_are_refused_and_all_ends_with_the_supervisor(
    serve: Serve, broker_url: str, tiny_llama: Path
) -> None:
    arguments = (str(tiny_llama), "--broker", broker_url, "--cluster", "twice")
    first = serve(*arguments)
    first.wait_until("OpenAI API at")
    second = serve(*arguments)
    assert second.process.wait(30) == 2
    assert "cluster 'twice'" in second.output
    assert "already runs pd0" in second.output

    below = descendants(first.process.pid)
    assert len(below) >= 2  # a worker, the proxy
    first.process.send_signal(signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in below), 20, "the end of all processes")


def test_a_worker_that_does_not_stop_is_killed_in_time(serve: Serve, tiny_llama: Path) -> None:
    serving = serve(str(tiny_llama))
    serving.wait_until("OpenAI API at")
    below = descendants(serving.process.pid)
    os.kill(serving.pid_of("pd0"), signal.SIGSTOP)
    serving.interrupt()
    assert eventually(lambda: serving.process.poll() is not None, 20, "the end of the cluster") < 10
    assert [pid for pid in below if alive(pid)] == []
    assert "killed, did not stop in time: pd0" in serving.output


def test_a_second_interrupt_kills_at_once(serve: Serve, tiny_llama: Path) -> None:
    serving = serve(str(tiny_llama))
    serving.wait_until("OpenAI API at")
    below = descendants(serving.process.pid)
    os.kill(serving.pid_of("pd0"), signal.SIGSTOP)
    serving.interrupt()
    serving.wait_until("stopping", 5)
    serving.interrupt()
    assert eventually(lambda: serving.process.poll() is not None, 10, "the end of the cluster") < 3
    assert [pid for pid in below if alive(pid)] == []


def test_an_interrupt_during_the_start_leaves_nothing(serve: Serve, tiny_llama: Path) -> None:
    serving = serve(str(tiny_llama))
    eventually(lambda: len(descendants(serving.process.pid)) >= 3, 20, "the start of the processes")
    below = descendants(serving.process.pid)
    serving.interrupt()
    assert eventually(lambda: serving.process.poll() is not None, 20, "the end of the cluster") < 10
    assert [pid for pid in below if alive(pid)] == []
    assert list(serving.temporary.iterdir()) == []


def test_a_worker_that_cannot_start_fails_the_start_with_its_last_lines(serve: Serve, tmp_path: Path) -> None:
    broken = make_llama(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 1}))
    serving = serve(str(broken))
    assert serving.process.wait(120) == 1
    assert "error: pd0 ended before it was ready (exit code 1)" in serving.output
    assert "the model needs" in serving.output
    assert "Traceback" not in serving.output
    (kept,) = serving.temporary.iterdir()
    assert f"logs are kept in {kept}" in serving.output
    assert sorted(path.name for path in kept.iterdir()) == ["pd0.log", "proxy.log"]
