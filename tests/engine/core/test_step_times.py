"""What the loop tells the pace of the time that steps take."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.model_info import ModelInfo
from engine.core import step_loop
from engine.state.inputs import ScheduledStep
from tests.engine.core.test_overlap import ahead_engine
from tests.engine.driving import Driver, greedy, text


def test_the_pace_hears_of_a_steps_own_launch_and_of_the_wait_for_it(
    tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with prompts are slow to launch here: that is not the time of the decode step that is waited for next."""
    engine, clock_s, told = ahead_engine(tiny_llama), [0.0], list[tuple[bool, float]]()
    loop, launch, wait = engine.loop, engine.runner.run, engine.loop.decoding.collect

    def slow_launch(step: ScheduledStep, *rest: Any) -> Any:
        clock_s[0] += 30.0 if sum(step.num_tokens) > step.num_decodes else 1.0
        return launch(step, *rest)

    def slow_wait(batch: Any) -> Any:
        clock_s[0] += 3.0
        return wait(batch)

    def hear(step: ScheduledStep, seconds: float, launch_s: float) -> None:
        assert launch_s == 0.0, "a CPU does not work meanwhile"
        told.append((sum(step.num_tokens) > step.num_decodes, seconds))

    monkeypatch.setattr(step_loop, "time", SimpleNamespace(perf_counter=lambda: clock_s[0], monotonic=time.monotonic))
    monkeypatch.setattr(engine.runner, "run", slow_launch)
    monkeypatch.setattr(loop.decoding, "collect", slow_wait)
    engine.scheduler.pace = cast(Any, SimpleNamespace(observe=hear, limit=lambda *_: None, last_limit=0))
    driver = Driver(engine)
    for name in "abc":
        driver.add(text(name, 9, greedy(9)))
        for _ in range(4):
            driver.step()
    driver.finish()
    assert set(told) == {(True, 33.0), (False, 4.0)}
    assert len([1 for has_prompt, _ in told if has_prompt]) == 3
