"""What long-running processes do about their memory: looked at from outside, in processes of their own."""

from __future__ import annotations

import asyncio
import sys

import pytest
from structlog.testing import capture_logs

from common.process import memory_upkeep
from tests.common.process.heaps import PROGRAM, printed_by
from tests.eventually import eventually

MIB = 2**20

_LOADED = """
import asyncio, gc
from common.process import memory_upkeep
loaded = [[number] for number in range(200_000)]  # stands for modules
SETTLE
print(len(gc.get_objects()))
"""

_CIRCLES = """
import asyncio, gc
from common.process import memory_upkeep

class Held:
    gone = asyncio.Event()
    def __init__(self):
        self.itself = self
    def __del__(self):
        self.gone.set()

async def main():
    memory_upkeep.settle()
    circle = Held()
    gc.collect(0)
    gc.collect(1)  # it is of the oldest generation now
    del circle
    gc.collect(1)
    assert not Held.gone.is_set()
    tidying = asyncio.create_task(memory_upkeep.tidy_up(every_s=0.01))
    async with asyncio.timeout(30):
        await Held.gone.wait()
    tidying.cancel()

asyncio.run(main())
"""

_TIDY = f"""
{PROGRAM}
malloc.use_one_arena()

async def main():
    before = resident()
    free_burst()
    kept = resident() - before
    tidying = asyncio.create_task(memory_upkeep.tidy_up(OPTIONS))
    async with asyncio.timeout(30):
        while resident() - before > kept / 4:
            await asyncio.sleep(0.01)
    tidying.cancel()
    print(kept)

asyncio.run(main())
"""


def test_once_settled_the_collector_does_not_look_at_what_was_loaded() -> None:
    assert int(printed_by(_LOADED.replace("SETTLE", ""))) > 200_000
    assert int(printed_by(_LOADED.replace("SETTLE", "memory_upkeep.settle()"))) < 20_000


def test_what_hangs_together_in_circles_goes_soon() -> None:
    printed_by(_CIRCLES)


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's malloc that is told")
@pytest.mark.parametrize("options", ["every_s=0.01", "is_idle=iter([True, False] + 1000 * [True]).__next__"])
def test_what_a_burst_has_left_in_the_heap_goes_back_now_and_then_and_after_work(options: str) -> None:
    """It had been kept before: the program ends only once most of it is gone."""
    assert int(printed_by(_TIDY.replace("OPTIONS", options))) > 48 * MIB


async def test_an_end_that_nobody_asked_for_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no thread")

    monkeypatch.setattr(memory_upkeep, "settle", lambda: None)
    monkeypatch.setattr(memory_upkeep, "tidy_up", lambda *_, **__: asyncio.to_thread(fails))
    with capture_logs() as logs:
        memory_upkeep.begin()
        await eventually(lambda: bool(logs))
    assert "no thread" in logs[0]["error"]
