"""The pace of steps: learned from their times, so that prompts leave room for the next tokens of others."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.pace import MIN_TOKENS, PrefillPace
from engine.state.inputs import ScheduledStep, tile_of


@dataclass
class Device:
    """Takes a fixed time for a step, some for each row, and some for each prompt token."""

    fixed_s: float = 0.004
    row_s: float = 0.001
    token_s: float = 0.0002

    def step_s(self, rows: int, tokens: int) -> float:
        return self.fixed_s + rows * self.row_s + tokens * self.token_s

    def run(self, pace: PrefillPace, rows: int, tokens: int, context: int = 0, noise: float = 1.0) -> float:
        counts = [1] * rows + ([tokens] if tokens else [])
        sequences: list[Any] = [SimpleNamespace(num_computed_tokens=context + count) for count in counts]
        seconds, launch_s = self.times(rows, tokens)
        seconds *= noise
        pace.observe(ScheduledStep(sequences, counts, []), seconds, launch_s)
        return seconds

    def times(self, rows: int, tokens: int) -> tuple[float, float]:
        """Of a step, and of them those of a launch beside which a device works."""
        return self.step_s(rows, tokens), 0.0


@dataclass
class Gpu(Device):
    """Computes steps with prompts while they are launched, kernel by kernel, as long as that takes."""

    launch_s: float = 0.03

    def times(self, rows: int, tokens: int) -> tuple[float, float]:
        launch_s = self.launch_s if tokens else 0.001
        return max(launch_s, self.step_s(rows, tokens)), launch_s


OBJECTIVE_S = 0.1


def learned() -> tuple[PrefillPace, Device]:
    """A pace that has seen a prompt alone and four rows alone."""
    pace, device = PrefillPace(OBJECTIVE_S), Device()
    device.run(pace, 0, 512)
    device.run(pace, 4, 0)
    return pace, device


def test_nothing_is_limited_before_a_prompt_has_run_and_rows_come_first() -> None:
    pace = PrefillPace(OBJECTIVE_S)
    assert pace.limit(4, 0, 0) == 0
    Device().run(pace, 4, 0)
    assert pace.limit(4, 0, 0) is None
    assert learned()[0].limit(4, 0, 0) is not None


@given(
    device=st.builds(Device, st.floats(0.001, 0.02), st.floats(1e-5, 1e-3), st.floats(1e-5, 1e-3)),
    rows=st.integers(1, 64),
    context=st.integers(0, 4000),
    share=st.floats(1.2, 8),
)
def test_steps_with_prompts_keep_to_the_objective_and_use_it(
    device: Device, rows: int, context: int, share: float
) -> None:
    """The time of a step is within a tenth of the objective and a tile, or the least that gets prompts to their end."""
    objective_s = share * device.step_s(rows, 0)
    pace = PrefillPace(objective_s)
    device.run(pace, 0, 512, context)
    for _ in range(3):
        device.run(pace, rows, 0)
    for _ in range(60):
        limit = pace.limit(rows, context, 0)
        assert limit is not None
        seconds = device.run(pace, rows, limit, context)
        device.run(pace, rows, 0)
    assert limit == MIN_TOKENS or seconds <= 1.1 * objective_s
    assert limit == MIN_TOKENS or (rows + limit) % tile_of(rows + limit) == 0, "no token pads the last tile"
    assert seconds + tile_of(rows + limit) * device.token_s >= 0.9 * objective_s


@pytest.mark.parametrize("objective_s", [None, OBJECTIVE_S])
def test_rows_run_alone_once_before_prompts_join_them(objective_s: float | None) -> None:
    """The first prompt of a life decodes when the next ones come: its first gap would be that of all their tokens."""
    pace, device = PrefillPace(objective_s), Device()
    device.run(pace, 0, 290)
    assert pace.limit(1, 0, 2000) == 0
    device.run(pace, 1, 0)
    assert MIN_TOKENS <= (pace.limit(1, 0, 0) or 0) < 1000
    assert MIN_TOKENS <= (pace.limit(64, 900, 0) or 0) < 1000, "other rows count as these until they ran"


def test_the_cost_of_a_step_is_learned_by_context_and_by_rows() -> None:
    """Tokens far into a prompt cost three times as much here, and 64 rows eight times as much as four."""
    pace, near, far, many = PrefillPace(OBJECTIVE_S), Device(), Device(token_s=0.0006), Device(fixed_s=0.0)
    near.run(pace, 0, 512)
    near.run(pace, 4, 0)
    many.run(pace, 64, 0)
    for _ in range(60):
        for device, context in ((near, 0), (far, 4000)):
            device.run(pace, 4, pace.limit(4, context, 0) or 0, context)
    for device, rows, context in ((near, 4, 0), (far, 4, 4000), (many, 64, 0)):
        seconds = device.step_s(rows, pace.limit(rows, context, 0) or 0)
        assert seconds == pytest.approx(OBJECTIVE_S, rel=0.1), (rows, context)


def test_a_machine_that_becomes_slower_is_noticed_though_every_step_has_prompts() -> None:
    """Else prompts would get too much for ever."""
    pace, device = learned()
    before = pace.limit(4, 0, 0)
    assert device.step_s(4, before or 0) == pytest.approx(OBJECTIVE_S, rel=0.1)
    slow = Device(3 * device.fixed_s, 3 * device.row_s, 3 * device.token_s)
    for _ in range(100):
        slow.run(pace, 4, pace.limit(4, 0, 0) or 0)
    assert slow.step_s(4, pace.limit(4, 0, 0) or 0) == pytest.approx(OBJECTIVE_S, rel=0.1)


def test_a_single_stall_changes_little() -> None:
    pace, device = learned()
    before = pace.limit(4, 0, 0)
    Device(fixed_s=5.0).run(pace, 4, 0)
    for _ in range(20):
        device.run(pace, 4, 0)
    assert pace.limit(4, 0, 0) == pytest.approx(before, rel=0.05)


def test_sizes_that_never_ran_count_as_the_nearest() -> None:
    pace, _ = learned()
    limits = [pace.limit(rows, context, 0) or 0 for rows, context in [(4, 0), (5, 0), (7, 3000)]]
    assert min(limits) > 0
    assert max(limits) - min(limits) <= 16
    assert [(rows + limit) % 16 for rows, limit in zip((4, 5, 7), limits, strict=True)] == [0, 0, 0]


@pytest.mark.parametrize(("waiting_s", "times"), [(0.0, 4), (0.3, 4), (0.4, 5), (0.45, 10), (60.0, 10)])
def test_without_an_objective_steps_last_longer_as_prompts_wait(waiting_s: float, times: float) -> None:
    """Four times as long as without prompts, or as it takes to compute those that wait within half a second."""
    pace, device = PrefillPace(), Device(token_s=0.0002)
    device.run(pace, 4, 0)
    pace.observe(ScheduledStep([SimpleNamespace(num_computed_tokens=1000)], [1000], []), 1000 * device.token_s)  # type: ignore[list-item]
    limit = pace.limit(4, 0, int(waiting_s / device.token_s))
    expected = (times - 1) * device.step_s(4, 0) / device.token_s
    assert limit is not None
    assert expected - 17 < limit <= expected, "less than a tile below"
    assert (4 + limit) % 16 == 0


@pytest.mark.parametrize("prompts", [(270, 20, 20), (270,), (4096,)], ids=str)
def test_a_slow_launch_is_not_taken_for_slow_tokens(prompts: tuple[int, ...]) -> None:
    """Else prompts would be cut into chunks that are all launched as slowly, and each would seem to say so again."""
    pace, device, budget = PrefillPace(), Gpu(fixed_s=0.003, row_s=0.0001, token_s=14e-6), 2048
    device.run(pace, 0, 270)
    surplus = 0
    for turn in range(60):
        left = prompts[turn % len(prompts)]
        surplus -= math.ceil(left / budget)
        while left:
            device.run(pace, 4, 0)
            chunk = min(left, pace.limit(4, 0, 600) or budget, budget)
            assert device.run(pace, 4, chunk) <= 0.033
            left, surplus = left - chunk, surplus + 1
    assert surplus <= 3, "sixty prompts in hardly more steps than the budget asks for"


def test_time_that_few_tokens_take_as_well_is_not_taken_for_theirs() -> None:
    """A replayed step reads the weights in 3.5 ms, and computes a prompt of 300 tokens in as much again: small chunks
    at the start, of prompts that ended there, do not stay small."""
    pace, device = PrefillPace(), Gpu(fixed_s=0.0035, row_s=0.0, token_s=12e-6, launch_s=0.0013)
    for _ in range(5):
        device.run(pace, 4, 0)
        device.run(pace, 4, 16)
    for _ in range(5):
        assert (pace.limit(4, 0, 300) or 0) >= 300
        device.run(pace, 4, 300)


def test_prompts_alone_say_nothing_about_steps_with_many_rows() -> None:
    pace, device = PrefillPace(), Gpu(fixed_s=0.0035, row_s=0.0003, token_s=12e-6, launch_s=0.0013)
    for rows, tokens in [(0, 300), (64, 0), *[(0, 300)] * 20]:
        device.run(pace, rows, tokens)
    limit = pace.limit(64, 0, 300)
    assert limit is not None
    assert device.step_s(64, limit) <= 4.1 * device.step_s(64, 0)


def test_tokens_that_outlast_the_launch_keep_to_the_objective() -> None:
    pace, device = PrefillPace(OBJECTIVE_S), Gpu(token_s=0.0002)
    for _ in range(60):
        device.run(pace, 4, 0)
        seconds = device.run(pace, 4, pace.limit(4, 0, 0) or 512)
    assert seconds == pytest.approx(OBJECTIVE_S, rel=0.1)


@pytest.mark.parametrize("first", [2, 5, 16])
@pytest.mark.parametrize(
    "device",
    [Gpu(0.01, 0.0, 1e-6, launch_s=0.001), Device(0.01, 0.0, 1e-6), Gpu(0.0035, 0.0, 12e-6, launch_s=0.0013)],
    ids=["a step takes as long whatever its size", "without a launch of its own", "replayed steps"],
)
def test_a_first_prompt_of_few_tokens_says_little_about_those_of_others(device: Device, first: int) -> None:
    """What such a step takes is the time of the weights: prompts behind it are in small chunks for few steps."""
    pace, num_steps = PrefillPace(OBJECTIVE_S), 0
    device.run(pace, 0, first)
    for _ in range(8):
        device.run(pace, 4, 0)
        left = 300
        while left:
            chunk = min(left, pace.limit(4, 300 - left, 0) or left)
            device.run(pace, 4, chunk, 300 - left)
            left, num_steps = left - chunk, num_steps + 1
    assert num_steps <= 12


@pytest.mark.parametrize("device", [Device(), Gpu(launch_s=0.001)], ids=["cpu", "gpu"])
def test_prompts_that_never_run_alone_show_the_time_of_a_token(device: Device) -> None:
    """As where the first requests of a worker have prompts of one token, or KV from elsewhere, and go on."""
    pace = PrefillPace(OBJECTIVE_S)
    device.run(pace, 4, 0)
    assert pace.limit(4, 0, 1000) is None
    device.run(pace, 4, 1000)
    for _ in range(5):
        seconds = device.run(pace, 4, pace.limit(4, 0, 1000) or 1000)
    assert seconds == pytest.approx(OBJECTIVE_S, rel=0.1)


@pytest.mark.parametrize("first", [2, 8, 500])
def test_prompts_that_always_have_others_rows_beside_them_are_in_chunks_of_the_objective(first: int) -> None:
    """The first one's few tokens do not take the time of the rows for theirs."""
    pace, device, dice = PrefillPace(OBJECTIVE_S), Device(), random.Random(first)
    left, steps = [first, *[3000] * 6], list[float]()
    while left:
        limit = pace.limit(64, 0, sum(left))
        chunk = min(left[0], 1024, left[0] if limit is None else limit)
        steps.append(device.run(pace, 64, chunk, noise=dice.uniform(0.9, 1.1)))
        left[0] -= chunk
        left = left if left[0] else left[1:]
    assert len(steps) < 250, "a chunk has 160 tokens at best"
    assert sorted(steps)[len(steps) // 2] < 1.2 * OBJECTIVE_S
