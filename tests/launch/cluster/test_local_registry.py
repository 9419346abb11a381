"""How commands find the cluster that `serve` runs for the same user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from common.config import Settings
from common.errors import TriptychError
from launch.cluster.local_registry import LocalEntry, announced, find_local, local_url, reach

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TRIPTYCH_BROKER", "TRIPTYCH_CLUSTER_KEY", "TRIPTYCH_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "triptych"


def entry(cluster: str = "here", base_url: str = "http://127.0.0.1:8000") -> LocalEntry:
    return LocalEntry(cluster, base_url, "redis://:secret@127.0.0.1:6379", KEY, "/models/tiny")


def named(cluster: str, **given: int) -> Settings:
    """Settings with any name: not all of these are valid ones."""
    return Settings().model_copy(update={"cluster": cluster, **given})


def test_a_cluster_is_found_as_long_as_it_runs_and_leaves_nothing(runtime: Path) -> None:
    with announced(entry("a/b c")):
        assert find_local(named("a/b c")) == entry("a/b c")
    with pytest.raises(TriptychError, match="no cluster 'a/b c' of yours runs on this machine"):
        find_local(named("a/b c"))
    assert not runtime.exists()


def test_requests_go_to_the_only_cluster_that_runs() -> None:
    assert local_url() == "http://127.0.0.1:8000"
    with announced(entry("here", "http://127.0.0.1:9001")):
        assert local_url() == "http://127.0.0.1:9001"


def test_the_port_tells_clusters_of_one_name_apart() -> None:
    with announced(entry("here", "http://127.0.0.1:9001")):
        assert find_local(named("here", port=9002)).base_url.endswith("9001"), "the only one needs no port"
    # Two entries of one process would share a file's name.
    code = (
        "from launch.cluster.local_registry import *; import sys\n"
        "with announced(LocalEntry('here', 'http://127.0.0.1:9001', 'redis://h:1', '', 'm')):\n"
        "    print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        with announced(entry("here", "http://127.0.0.1:9002")):
            assert find_local(named("here", port=9002)).base_url.endswith("9002")
            assert find_local(named("here", port=9001)).base_url.endswith("9001")
            with pytest.raises(TriptychError, match=r"several clusters 'here' run here .*: give the --port of one"):
                find_local(named("here", port=9003))
            with pytest.raises(TriptychError, match="several clusters 'here'"):
                reach(Settings(cluster="here"))
        assert other.stdin is not None
        other.stdin.close()


def test_nobody_else_can_read_its_secrets(runtime: Path) -> None:
    with announced(entry()):
        (file,) = runtime.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert runtime.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_not_trusted(runtime: Path) -> None:
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    with pytest.raises(TriptychError, match="belongs to this user alone"), announced(entry()):
        pass
    assert list(runtime.iterdir()) == []
    with pytest.raises(TriptychError, match="belongs to this user alone"):
        find_local(named("here"))


def test_a_cluster_that_was_killed_is_not_found_and_its_file_goes(runtime: Path) -> None:
    code = (
        "from tests.launch.cluster.test_local_registry import announced, entry\n"
        "with announced(entry()):\n    print('up', flush=True)\n    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as serve:
        assert serve.stdout is not None
        assert serve.stdout.readline() == b"up\n"
        assert find_local(named("here")) == entry()
        os.kill(serve.pid, signal.SIGKILL)
    assert len(list(runtime.iterdir())) == 1
    with pytest.raises(TriptychError, match="no cluster 'here'"):
        find_local(named("here"))
    assert list(runtime.iterdir()) == []


def test_two_of_one_name_are_told_apart_by_their_addresses(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with announced(entry()):
        monkeypatch.setattr(os, "getpid", lambda: 1)
        other = announced(entry(base_url="http://127.0.0.1:9000"))
        with other, pytest.raises(TriptychError, match=r"8000, http://127\.0\.0\.1:9000"):
            find_local(named("here"))
        assert find_local(named("here")) == entry()


def test_what_is_given_wins_over_what_is_found() -> None:
    with announced(entry()):
        found = reach(Settings(cluster="here"))
        assert found.broker == entry().broker
        assert found.cluster_key is not None
        assert found.cluster_key.get_secret_value() == KEY
        assert found.model == "/models/tiny"
        own = SecretStr("cd" * 32)
        given = reach(Settings(cluster="here", cluster_key=own, model="signpost"))
        assert (given.cluster_key, given.model) == (own, "signpost")
    elsewhere = Settings(cluster="here", broker="redis://10.0.0.5:6379")
    assert reach(elsewhere) is elsewhere
