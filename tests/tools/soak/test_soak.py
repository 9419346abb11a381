"""The verdict of a long run: what fails it, and that its load is a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.errors import TriptychError
from tests.eventually import eventually
from tools.soak.asking import Reply
from tools.soak.asks import Ask
from tools.soak.load import Job, LoadProcess
from tools.soak.memory import Life, MemoryLog
from tools.soak.report import MIB, Findings, Part, Plan, as_markdown
from tools.soak.tally import MAX_TOLD, Judge, Tally

MINUTES = [60.0 * minute for minute in range(40)]
ASK = Ask("a question", "/v1/chat/completions", {}, stream=False, again=True)


def life(size_of: Callable[[int], float], name: str = "pd0", mib: float = 300) -> Life:
    """Sampled each minute: `size_of(minute)` times so many MiB."""
    sizes = [int(mib * MIB * size_of(minute)) for minute in range(len(MINUTES))]
    return Life(name, 1, array("d", MINUTES), array("q", sizes))


def answered(*tokens: int) -> Reply:
    return Reply("whole", Counter({0: list(tokens)}), finish={0: "stop"})  # type: ignore[arg-type]


def findings(**changes: Any) -> Findings:
    """Of a run in which everything was right, but for these."""
    plan = Plan(60, (Part("pictures", "signpost", "1e1pd", 4),), 90, 1)
    lives = [life(lambda _: 1.0, name) for name in ("supervisors", "pictures proxy", "pictures pd0")]
    spared = [one.name for one in lives]
    tally = Tally({"whole": 1000, "left": 10, "refused": 1}, tokens=5000, compared=500)
    right = Findings(plan, [tally], [Counter(kill=3)], {"pictures pd1": 3}, spared, lives, {}, [], [])
    return replace(right, **changes)


@pytest.mark.parametrize(
    "size_of",
    [
        lambda minute: 1 + 0.03 * minute / 39,  # 3 % over the window
        lambda minute: 1 + 0.005 * minute,
        lambda minute: 1 + 0.03 * (minute // 10) / 3,  # in steps
        lambda minute: 1 + 0.03 * minute / 39 + random.Random(minute).uniform(-0.01, 0.01),
    ],
)
def test_memory_that_leaks_is_not_flat(size_of: Callable[[int], float]) -> None:
    assert not life(size_of).flat


@pytest.mark.parametrize(
    "size_of",
    [
        lambda _: 1.0,
        lambda minute: 1 + 0.05 * (minute % 2),  # up and down
        lambda minute: 1 - 0.01 * minute,
        lambda minute: 1 + 0.015 * minute / 39,
        lambda minute: 1.3 if minute == 25 else 1.0,  # in the middle of something large
    ],
)
def test_memory_that_goes_up_and_down_is_flat(size_of: Callable[[int], float]) -> None:
    assert life(size_of).flat


def test_half_a_mebibyte_is_noise_for_a_small_process_and_more_is_not() -> None:
    assert life(lambda minute: 7 + 0.45 * minute / 39, mib=1).flat
    assert not life(lambda minute: 7 + 0.6 * minute / 39, mib=1).flat


def test_a_life_is_judged_where_it_lasted_through_the_window() -> None:
    log, here = MemoryLog(), os.getpid()
    log.sample([("early", here), ("whole", here), ("gone", 2**22 + 1)], 0.0)
    log.sample([("early", here), ("whole", here)], 30.0)
    log.sample([("late", here), ("whole", here)], 40.0)
    log.sample([("late", here), ("whole", here)], 60.0)
    (survivor,) = log.survivors()
    assert survivor.name == "whole"
    assert list(survivor.times_s) == [30.0, 40.0, 60.0]
    assert all(size > MIB for size in survivor.sizes)


def test_a_good_run_is_ok_whatever_its_load_does() -> None:
    right, load = findings(), life(lambda minute: 1 + 0.1 * minute, "pictures load")
    good = replace(right, lives=[*right.lives, load], kept=["of pictures, because …"])
    assert good.failures == []
    assert "**ok**" in as_markdown(good)
    assert "| pictures load | 885.0 | 300.0 | 1470.0 | 1170.0 | +132.20 | not judged |" in as_markdown(good)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lives": []}, "pictures proxy did not live through the window"),
        ({"tallies": [Tally({"whole": 10, "broken": 1})]}, "1 wrong or missing answers"),
        ({"tallies": [Tally({"whole": 10, "closed": 2})]}, "2 wrong or missing answers"),
        ({"tallies": [Tally({"whole": 10}, wrong=3)]}, "3 wrong or missing answers"),
        ({"tallies": [Tally({"refused": 10})]}, "no whole answer"),
        ({"left": {"pictures pd0 kv_blocks_used": 1.0}}, "still held: pictures pd0 kv_blocks_used: 1"),
        ({"remains": ["/dev/shm/sem.x"]}, "left behind: /dev/shm/sem.x"),
        ({"restarts": {"pictures proxy": 1}}, "pictures proxy ended though nothing had hit it"),
        ({"spared": ["pictures broker"]}, "pictures broker did not live through the window"),
    ],
)
def test_what_fails_a_run_is_said(changes: dict[str, Any], why: str) -> None:
    failed = findings(**changes)
    assert why in "; ".join(failed.failures)
    assert why in as_markdown(failed)


def test_a_leaking_service_fails_a_run() -> None:
    right = findings()
    leaking = replace(right, lives=[*right.lives, life(lambda minute: 1 + 0.001 * minute, "pictures e0")])
    assert leaking.failures == ["memory of pictures e0 rose by 3.83 %"]
    assert "| pictures e0 | 305.8 | 300.0 | 311.7 | 11.7 | +3.83 | NO |" in as_markdown(leaking)


def test_answers_to_the_same_ask_are_compared_with_the_first_whole_one() -> None:
    judge = Judge()
    judge.note(ASK, Reply("refused"))
    judge.note(ASK, answered(1, 2, 3))
    judge.note(ASK, answered(1, 2, 3))
    judge.note(ASK, Reply("left", Counter({0: [1, 2]})))  # type: ignore[arg-type]
    assert (judge.tally.compared, judge.tally.wrong, judge.tally.failures) == (2, 0, 0)
    judge.note(ASK, answered(1, 2, 4))
    judge.note(ASK, Reply("left", Counter({0: [2]})))  # type: ignore[arg-type]
    assert (judge.tally.compared, judge.tally.wrong, judge.tally.failures) == (4, 2, 2)
    assert judge.tally.tokens == 3 + 3 + 2 + 3 + 1
    assert "[1, 2, 4]" in judge.tally.told[0]


def test_what_never_comes_again_is_not_remembered_and_little_is_told() -> None:
    judge = Judge()
    for number in range(100):
        judge.note(replace(ASK, name=f"once {number}", again=False), answered(number))
        judge.note(replace(ASK, name=f"lost {number}", again=False), Reply("closed", error="reset"))
    assert judge._known == {}
    assert judge.tally.endings == {"whole": 100, "closed": 100}
    assert judge.tally.failures == 100
    assert len(judge.tally.told) == MAX_TOLD


async def test_a_load_is_a_process_that_tells_its_tally_and_ends_by_itself() -> None:
    load = LoadProcess()
    nobody = Job("pictures", "signpost", "1", "http://127.0.0.1:9", in_flight=2, seconds=0.1)
    running = asyncio.create_task(load.run(nobody))
    await eventually(lambda: load.pid is not None, 20)
    assert load.pid != os.getpid()
    await running
    assert load.tally.endings.keys() == {"closed"}
    assert load.tally.failures >= 2
    assert load.pid is None


async def test_a_load_that_dies_is_an_error() -> None:
    with pytest.raises(TriptychError, match="the load of nothing ended early: exit code 1"):
        await LoadProcess().run(Job("nothing", "signpost", "1", "http://127.0.0.1:9", in_flight=1, seconds=1))
