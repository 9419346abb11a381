"""The engine thread: commands in, events out, asleep in between, and honest about its death."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from common.errors import TriptychError
from services.process.engine_thread import EngineThread
from tests.eventually import eventually


@dataclass
class Echo:
    """An engine whose step returns what was put into it."""

    pending: list[str] = field(default_factory=list)
    deadline_s: float | None = None
    num_steps: int = 0
    thread: int = 0

    def has_work(self) -> bool:
        return bool(self.pending)

    def stats(self) -> dict[str, float]:
        return {"steps": self.num_steps}

    def step(self) -> list[str]:
        self.num_steps += 1
        self.thread = threading.get_ident()
        events, self.pending = self.pending, []
        return events


class Harness:
    def __init__(self) -> None:
        self.engine = Echo()
        self.events: list[str] = []
        self.thread: EngineThread[Echo, str] = EngineThread(
            build=lambda: self.engine,
            step=Echo.step,
            next_deadline_s=lambda engine: engine.deadline_s,
        )
        self.reading = asyncio.create_task(self.read())

    async def read(self) -> None:
        while True:
            self.events += await self.thread.events.get()

    def put(self, word: str) -> None:
        self.thread.submit(lambda engine: engine.pending.append(word))

    def set_deadline(self, deadline_s: float | None) -> None:
        self.thread.submit(lambda engine: setattr(engine, "deadline_s", deadline_s))


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A started thread, stopped and ended after the test."""
    harness = Harness()
    harness.thread.start()
    yield harness
    harness.thread.stop()
    assert await asyncio.to_thread(harness.thread.join, 1.0)


async def test_commands_run_in_order_on_the_engines_thread_and_events_come_back_on_the_loop(harness: Harness) -> None:
    await harness.thread.loaded
    for number in range(100):
        harness.put(str(number))
    await eventually(lambda: len(harness.events) == 100)
    assert harness.events == [str(number) for number in range(100)]
    assert harness.engine.thread != threading.get_ident()
    harness.thread.stop()
    assert await harness.thread.ended is None


async def test_a_deadline_in_a_thousand_years_is_slept_towards(harness: Harness) -> None:
    harness.set_deadline(time.monotonic() + 1e12)
    harness.put("still there")
    await eventually(lambda: harness.events == ["still there"])
    harness.put("again")
    await eventually(lambda: harness.events == ["still there", "again"])
    harness.thread.stop()
    assert await harness.thread.ended is None


async def test_an_idle_engine_is_left_alone(harness: Harness) -> None:
    assert await harness.thread.call(lambda engine: engine.num_steps, 1.0) == 0
    before = await harness.thread.call(lambda engine: engine.num_steps, 1.0)
    with pytest.raises(TimeoutError):  # nothing happens meanwhile
        async with asyncio.timeout(0.1):
            await asyncio.shield(harness.thread.ended)
    assert await harness.thread.call(lambda engine: engine.num_steps, 1.0) == before + 1
    await eventually(lambda: harness.thread.busy_s == 0.0)


async def test_a_deadline_wakes_it(harness: Harness) -> None:
    harness.set_deadline(time.monotonic() + 0.05)
    before = await harness.thread.call(lambda engine: engine.num_steps, 1.0)
    await eventually(lambda: harness.engine.num_steps > before + 1)  # one is the call's
    harness.set_deadline(None)


async def test_a_refused_command_harms_nobody(harness: Harness) -> None:
    def refuse(_: Echo) -> None:
        raise TriptychError("invalid_request", "no such thing")

    harness.thread.submit(refuse)
    harness.put("after")
    await eventually(lambda: harness.events == ["after"])
    harness.thread.stop()
    assert await harness.thread.ended is None


async def test_a_dead_engine_says_why(harness: Harness) -> None:
    def explode(_: Echo) -> None:
        raise ZeroDivisionError

    harness.thread.submit(explode)
    assert isinstance(await asyncio.shield(harness.thread.ended), ZeroDivisionError)
    assert await asyncio.to_thread(harness.thread.join, 1.0)


async def test_a_long_step_shows(harness: Harness) -> None:
    release = threading.Event()
    harness.thread.submit(lambda _: release.wait(5) and None)
    await eventually(lambda: harness.thread.busy_s > 0.05)
    release.set()
    await eventually(lambda: harness.thread.busy_s == 0.0)
