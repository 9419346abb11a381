"""What decodes a stranger's picture or sound is killed in the middle of it: the service and everybody else go on.

What it was doing is tried once more, alone: a helper may die of something else. An item that takes down its process
twice is refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from launch.cluster.local_cluster import LocalCluster
from proxy.media.audio import AudioWindows
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import picture, speech
from tests.security.conftest import API_KEY, answer_about
from tests.security.media import bombs
from tools.soak.memory import children_of

MIB = 2**20


async def kill_while_it_reads(recordings: AudioWindows) -> None:
    """Kill the helper that has a recording open: it decodes."""

    found: list[int] = []

    def reads() -> bool:
        found[:] = [child.pid for child in recordings._executor._processes.values() if has_recording_open(child.pid)]
        return bool(found)

    await eventually(reads, timeout_s=60)
    os.kill(found[0], signal.SIGKILL)


def has_recording_open(pid: int) -> bool:
    try:
        return any("memfd:recording" in os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has just ended, or closed one
        return False


async def test_a_recordings_helper_is_killed_while_it_decodes(serve: Any, whisper_model: Any) -> None:
    long = {"file": ("x.flac", bombs.silence(120, rate=192_000))}  # 23 million samples
    async with serve(whisper_model.folder) as rig:
        rig.http.timeout = httpx.Timeout(120)

        async def transcribe(files: Any) -> httpx.Response:
            return await rig.http.post("/v1/audio/transcriptions", files=files)

        recordings = rig.service.recordings
        asked = asyncio.create_task(transcribe(long))
        await kill_while_it_reads(recordings)
        assert (await asked).status_code == 200
        assert recordings.num_crashes == rig.count("helper_crashes_total") == 1
        asked = asyncio.create_task(transcribe(long))
        for _ in range(2):
            crashes = recordings.num_crashes
            await kill_while_it_reads(recordings)
            await eventually(lambda before=crashes: asked.done() or recordings.num_crashes > before, timeout_s=60)
        answer = await asked
        assert answer.status_code == 400
        assert rig.count("helper_crashes_total") == recordings.num_crashes == 3
        assert answer.json()["error"]["param"] == "file"
        assert "crashed its process twice" in answer.json()["error"]["message"]
        assert (await transcribe({"file": ("x.wav", speech(0.2))})).status_code == 200


@pytest.mark.cluster
def test_a_pictures_helper_is_killed_while_it_decodes(cluster: LocalCluster) -> None:
    encoder = cluster.instances["e0"].child.pid
    large = bombs.png_bomb(9984, 8000)  # 80 million pixels, which are accepted
    [idle] = helpers(encoder)
    limit = resident_bytes(idle) + 60 * MIB
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(see, cluster, large)
        wait_until(lambda: resident_bytes(idle) > limit)
        os.kill(idle, signal.SIGKILL)
        assert asked.result(120) == see(cluster, large)
    assert helpers(encoder) not in ([], [idle])
    assert see(cluster, picture())
    assert cluster.instances["e0"].child.pid == encoder


def see(cluster: LocalCluster, data: bytes) -> str:
    """What the cluster says about a picture."""
    return str(answer_about(cluster, data, API_KEY, max_tokens=16, temperature=0).message.content)


def helpers(pid: int) -> list[int]:
    """The processes that decode for a worker."""
    return [child for child in children_of(pid) if b"spawn_main" in command_of(child)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.005)
