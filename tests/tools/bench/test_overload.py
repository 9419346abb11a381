"""The goodput of a level, and its row."""

from __future__ import annotations

from tools.bench.offered import Level, Objective
from tools.bench.overload import table
from tools.bench.wire import Result

OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.1)


def level(share: float | None, duration_s: float, results: list[Result]) -> Level:
    made = Level(share)
    half = len(results) // 2
    made.add(results[:half], duration_s / 2)
    made.add(results[half:], duration_s / 2)
    return made


def test_an_answer_counts_only_within_both_objectives():
    assert OBJECTIVE.met_by(Result(200, ttft_s=2.0, latency_s=2.9, num_tokens=10))
    assert not OBJECTIVE.met_by(Result(200, ttft_s=2.1, latency_s=2.9, num_tokens=10))
    assert not OBJECTIVE.met_by(Result(200, ttft_s=1.0, latency_s=2.9, num_tokens=10))
    assert not OBJECTIVE.met_by(Result(429))


def test_a_row_per_rate_with_what_was_refused_and_what_is_left_of_the_peak():
    good, late = Result(200, 0.5, 0.6, 3), Result(200, 3.0, 3.1, 3)
    calm = level(None, 2.0, [good] * 20)
    crowded = level(2.0, 2.0, [good] * 18 + [late] * 2 + [Result(429)] * 15 + [Result(503)] * 4 + [Result(0)])
    lines = table([calm, crowded], OBJECTIVE).splitlines()
    assert lines[2] == "| as many as fit | 10.0 | 20 | 0 | 0 | 0 | 10.0 | 100% | 500 / 500 |"
    assert lines[3] == "| 2 | 20.0 | 40 | 19 | 1 | 2 | 9.0 | 90% | 500 / 3000 |"


def test_a_level_without_an_answer_has_no_times():
    assert table([level(1.0, 1.0, [Result(429)])], OBJECTIVE).splitlines()[2].endswith("| nan% | – |")
