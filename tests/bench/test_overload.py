"""The goodput of a level, and its row."""

from __future__ import annotations

from launch.bench.overload import Level, Objective, Result, table

OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.1)


def test_an_answer_counts_only_within_both_objectives():
    assert Result(200, ttft_s=2.0, latency_s=2.9, num_tokens=10).meets(OBJECTIVE)
    assert not Result(200, ttft_s=2.1, latency_s=2.9, num_tokens=10).meets(OBJECTIVE)
    assert not Result(200, ttft_s=1.0, latency_s=2.9, num_tokens=10).meets(OBJECTIVE)
    assert not Result(429).meets(OBJECTIVE)


def test_a_row_per_rate_with_what_was_refused_and_what_is_left_of_the_peak():
    good, late = Result(200, 0.5, 0.6, 3), Result(200, 3.0, 3.1, 3)
    calm = Level(1.0, 10.0, 2.0, [good] * 20)
    crowded = Level(2.0, 20.0, 2.0, [good] * 18 + [late] * 2 + [Result(429)] * 15 + [Result(503)] * 4 + [Result(0)])
    lines = table([calm, crowded], OBJECTIVE).splitlines()
    assert lines[2] == "| 10.0 | 1 | 20 | 0 | 0 | 10.0 | 100% | 500 / 500 |"
    assert lines[3] == "| 20.0 | 2 | 40 | 19 | 1 | 9.0 | 90% | 500 / 3000 |"


def test_a_level_without_an_answer_has_no_times():
    assert table([Level(1.0, 1.0, 1.0, [Result(429)])], OBJECTIVE).splitlines()[2].endswith("| nan% | – |")
