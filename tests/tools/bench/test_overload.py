"""The goodput of a level, and its row."""

from __future__ import annotations

from tools.bench.client import Outcome
from tools.bench.overload import Level, Objective, table

OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.1)


def answered(ttft_s: float, latency_s: float, num_tokens: int) -> Outcome:
    return Outcome("", num_tokens, latency_s, ttft_s)


def level(share: float | None, duration_s: float, results: list[Outcome]) -> Level:
    return Level(share, duration_s, results)


def test_an_answer_counts_only_within_both_objectives():
    assert OBJECTIVE.met_by(answered(2.0, 2.9, 10))
    assert not OBJECTIVE.met_by(answered(2.1, 2.9, 10))
    assert not OBJECTIVE.met_by(answered(1.0, 2.9, 10))
    assert not OBJECTIVE.met_by(Outcome(status=429))


def test_a_row_per_rate_with_what_was_refused_and_what_is_left_of_the_peak():
    good, late = answered(0.5, 0.6, 3), answered(3.0, 3.1, 3)
    calm = level(None, 2.0, [good] * 20)
    crowded = level(
        2.0,
        2.0,
        [good] * 18 + [late] * 2 + [Outcome(status=429)] * 15 + [Outcome(status=503)] * 4 + [Outcome(status=0)],
    )
    lines = table([calm, crowded], OBJECTIVE).splitlines()
    assert lines[2] == "| as many as fit | 10.0 | 20 | 0 | 0 | 0 | 10.0 | 100% | 500 / 500 |"
    assert lines[3] == "| 2 | 20.0 | 40 | 19 | 1 | 2 | 9.0 | 90% | 500 / 3000 |"


def test_a_level_without_an_answer_has_no_times():
    assert table([level(1.0, 1.0, [Outcome(status=429)])], OBJECTIVE).splitlines()[2].endswith("| nan% | – |")
