"""The preprocessing pool: bad items are reported, crashing ones contained, slow ones ended."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from common.errors import TriptychError
from services.encode import preprocess_pool
from services.encode.preprocess_pool import MemoryGate, PreprocessPool
from tests.eventually import eventually


def fake_process(kind: str, media: bytes) -> object:
    """Runs in the pool in the place of the real thing: the media say what to do."""
    match media.split(b" "):
        case [b"die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case [b"hang"]:
            threading.Event().wait(60)
        case [b"bad"]:
            raise TriptychError("bad_media", "not a picture")
        case [b"die-unless", path]:
            if not os.path.exists(path):
                open(path, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
    return SimpleNamespace(kind=kind, media=media, pid=os.getpid(), array_bytes=0)


def fake_initialize(model: str, dtype: str) -> None: ...


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PreprocessPool]:
    monkeypatch.setattr("engine.processors.process", fake_process)
    monkeypatch.setattr(preprocess_pool, "initialize", fake_initialize)
    pool = PreprocessPool("signpost", "float32", num_workers=1, timeout_s=5.0, staging_bytes=2**20)
    pool.gate = MemoryGate(2**20, max_unweighed=10)  # items wait for the process, not for memory
    await pool.warm_up(30.0)
    yield pool
    pool.close()


async def test_items_are_processed_in_another_process(pool: PreprocessPool) -> None:
    items = await asyncio.gather(*(pool.process("image", b"%d" % number) for number in range(10)))
    assert [item.media for item in items] == [b"%d" % number for number in range(10)]  # type: ignore[attr-defined]
    assert {item.pid for item in items} != {os.getpid()}  # type: ignore[attr-defined]


async def test_bad_media_say_so_across_the_process_boundary(pool: PreprocessPool) -> None:
    with pytest.raises(TriptychError, match="not a picture") as caught:
        await pool.process("image", b"bad")
    assert caught.value.info.code == "bad_media"
    assert (await pool.process("image", b"fine")) is not None


async def test_a_crash_is_retried_once(pool: PreprocessPool, tmp_path: os.PathLike[str]) -> None:
    assert await pool.process("image", b"die-unless " + os.fsencode(tmp_path) + b"/crashed") is not None
    assert pool.num_crashes == 1


async def test_an_item_that_kills_its_process_is_to_blame_and_its_neighbours_are_not(pool: PreprocessPool) -> None:
    results = await asyncio.gather(
        *(pool.process("image", media) for media in (b"one", b"die", b"two", b"three")), return_exceptions=True
    )
    assert [isinstance(result, TriptychError) for result in results] == [False, True, False, False]
    assert "crashed its process twice" in str(results[1])


async def test_an_item_that_hangs_is_ended_and_the_next_one_served(pool: PreprocessPool) -> None:
    pool._timeout_s = 0.2
    with pytest.raises(TriptychError, match="longer than"):
        await pool.process("image", b"hang")
    pool._timeout_s = 10.0
    assert await pool.process("image", b"fine") is not None


async def test_a_cancelled_item_frees_its_place_in_the_queue(pool: PreprocessPool) -> None:
    hanging = asyncio.create_task(pool.process("image", b"hang"))
    waiting = asyncio.create_task(pool.process("image", b"never"))
    await eventually(lambda: pool.num_waiting == 1)
    waiting.cancel()
    await eventually(lambda: pool.num_waiting == 0)
    hanging.cancel()
    await asyncio.gather(hanging, waiting, return_exceptions=True)


async def test_close_ends_the_processes(pool: PreprocessPool) -> None:
    children = list(pool._executor._processes.values())
    assert children
    pool.close()
    # The pool's own thread reaps them, too: for a moment after it has, one that is gone still counts as alive here.
    await eventually(lambda: not any(child.is_alive() for child in children))
