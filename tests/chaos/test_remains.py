"""What the tests of kills look for afterwards is found where it is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from broker.transports.shm import segment
from broker.transports.shm.sender import ARENA_BYTES
from launch.cluster.local_cluster import LocalCluster
from tests.chaos import remains
from tests.chaos.remains import Remains
from tools.soak.memory import children_of

WORKER = f"""
import mmap, os, subprocess, sys
children = []
for line in sys.stdin:
    if line.strip() == "map":
        fd = os.memfd_create("triptych")
        os.ftruncate(fd, {ARENA_BYTES})
        arena = mmap.mmap(fd, {ARENA_BYTES})
    else:
        children.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    print("done", flush=True)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    children: set[int] = set()
    try:
        yield process
        children = children_of(process.pid)
    finally:
        process.kill()
        process.communicate()
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def looking(worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> Remains:
    """At a cluster of this one worker, which has nothing yet."""
    monkeypatch.setattr(remains, "processes", lambda _: [("e0", worker.pid)])
    looking = Remains(cast(LocalCluster, None))
    looking.rest()
    assert looking.found() == []
    return looking


def tell(worker: subprocess.Popen[str], what: str) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{what}\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "done\n"


def test_an_arena_that_one_process_alone_has_is_found(worker: subprocess.Popen[str], looking: Remains) -> None:
    tell(worker, "map")
    [what] = looking.found()
    assert what.startswith("arena ")
    assert what.endswith(" of one process alone")


def test_a_process_more_than_usual_is_found_and_so_is_one_of_a_dead_worker(
    worker: subprocess.Popen[str], looking: Remains
) -> None:
    tell(worker, "start")
    assert looking.found() == ["e0: more processes than 0"]
    looking.rest()
    assert looking.found() == []
    [child] = children_of(worker.pid)
    worker.kill()
    worker.wait()
    assert looking.found() == [f"of e0: process {child}"]
    os.kill(child, signal.SIGKILL)


def test_whoever_maps_an_arena_has_it() -> None:
    before = remains._arenas(os.getpid())
    fd, memory = segment.create(ARENA_BYTES)
    os.close(fd)
    assert len(remains._arenas(os.getpid()) - before) == 1
    del memory
    assert remains._arenas(os.getpid()) == before
