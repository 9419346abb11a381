"""Helpers that may die: what another one's item does to them costs an item time, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from common.errors import TriptychError
from common.process.child_pool import ChildPool
from tests.eventually import eventually


def begin() -> None: ...


def begin_slowly() -> None:
    time.sleep(1.0)


def crash() -> None:
    os._exit(1)


def wait_for(go: str, begun: str) -> str:
    """Add a line to `begun`, then wait until `go` is there."""
    with open(begun, "a") as file:
        file.write("begun\n")
    while not os.path.exists(go):
        time.sleep(0.01)
    return "done"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    path = tmp_path / "begun"
    path.write_text("")
    return path


async def test_an_item_whose_process_died_is_tried_again_with_nobody_beside_it(tmp_path: Path, begun: Path) -> None:
    """A second process that dies meanwhile would take the first one's along, and the blame would fall on it."""
    pool, go = ChildPool(begin, work="reading", num_workers=2, timeout_s=60.0, memory_bytes=2**30), tmp_path / "go"
    try:
        innocent = asyncio.create_task(pool.run("innocent", wait_for, str(go), str(begun)))
        await eventually(lambda: begun.read_text().count("begun") == 1, 60.0)
        guilty = [asyncio.create_task(pool.run("guilty", crash))]
        await eventually(lambda: begun.read_text().count("begun") == 2, 60.0)
        guilty += [asyncio.create_task(pool.run("guilty", crash)) for _ in range(3)]
        await eventually(lambda: pool.num_waiting >= 3, 60.0)
        go.touch()
        assert await innocent == "done"
        for task in guilty:
            with pytest.raises(TriptychError, match="guilty crashed its process twice"):
                await task
        assert await pool.run("another", wait_for, str(go), str(begun)) == "done"
        assert pool.num_waiting == 0
    finally:
        pool.close()


async def test_one_who_gives_up_while_it_waits_to_be_alone_keeps_nobody_else_waiting(
    tmp_path: Path, begun: Path
) -> None:
    pool, go = ChildPool(begin, work="reading", num_workers=2, timeout_s=60.0, memory_bytes=2**30), tmp_path / "go"
    try:
        guilty = asyncio.create_task(pool.run("guilty", crash))
        await eventually(lambda: pool.num_crashes == 1, 60.0)
        working = asyncio.create_task(pool.run("innocent", wait_for, str(go), str(begun)))
        guilty.cancel()
        await asyncio.gather(guilty, return_exceptions=True)
        go.touch()
        assert await working == "done"
        others = [pool.run("another", wait_for, str(go), str(begun)) for _ in range(2)]
        assert await asyncio.gather(*others) == ["done", "done"]
        assert pool.num_waiting == 0
    finally:
        pool.close()


def die_within_the_result(begun: str) -> bytes:
    """Have this process killed, as by the system when memory runs out, when all but a byte of its result is sent."""

    def send_most(connection: Connection, data: bytes) -> None:
        os.write(connection.fileno(), bytes(data)[:-1])
        Path(begun).write_text("begun")
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = send_most  # type: ignore[attr-defined]
    return b"result"


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_process_killed_within_its_result_holds_no_slot_for_longer_than_an_item_may_take(
    num_workers: int, begun: Path
) -> None:
    """The thread that reads results has begun to read the rest, which never comes, and looks after nothing else."""
    pool = ChildPool(begin, work="reading", num_workers=num_workers, timeout_s=2.0, memory_bytes=2**30)
    try:
        await pool.warm_up(60.0)
        async with asyncio.timeout(60.0):
            killed = asyncio.create_task(pool.run("killed", die_within_the_result, str(begun)))
            await eventually(lambda: begun.read_text() == "begun", 60.0)
            given_up = asyncio.create_task(
                pool.run("given up", os.getpid)
            )  # waits, within the pool where there is room
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(TriptychError, match="killed took longer"):
                await killed
            good = [pool.run("good", os.cpu_count) for _ in range(num_workers)]
            assert await asyncio.gather(*good) == [os.cpu_count()] * num_workers
            assert pool.num_crashes == 1
    finally:
        pool.close()


async def test_processes_may_take_longer_to_start_than_an_item_to_end() -> None:
    """Else no item would outlive the start that follows a crash, and none would ever end."""
    pool = ChildPool(begin_slowly, work="reading", num_workers=1, timeout_s=0.7, memory_bytes=2**30)
    try:
        await pool.warm_up(60.0)
        os.kill(await pool.run("idle", os.getpid), signal.SIGKILL)
        assert await pool.run("good", os.cpu_count) == os.cpu_count()
        assert pool.num_crashes == 1
    finally:
        pool.close()


def give_much(begun: str) -> bytes:
    Path(begun).write_text(str(os.getpid()))
    return bytes(200_000_000)


@pytest.mark.slow
async def test_processes_killed_idle_or_in_the_middle_of_a_result_are_replaced(begun: Path) -> None:
    """Pools that share one pipe and its lock among their processes hang here, or give up for good."""
    pool = ChildPool(begin, work="reading", num_workers=2, timeout_s=60.0, memory_bytes=2**30)
    try:
        os.kill(await pool.run("idle", os.getpid), signal.SIGKILL)
        assert await pool.run("next", os.cpu_count) == os.cpu_count()
        large = asyncio.create_task(pool.run("large", give_much, str(begun)))
        read = begun.read_text
        await eventually(lambda: bool(read()), 60.0)
        await asyncio.sleep(0.05)  # while its result is under way, most times
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(read()), signal.SIGKILL)
        assert await pool.run("other", os.cpu_count) == os.cpu_count()
        assert len(await large) == 200_000_000
    finally:
        pool.close()
