"""Time as a process has lived it."""

from __future__ import annotations

from common.process.clocks import AwakeClock


def test_a_pause_between_two_looks_counts_no_more_than_a_gap() -> None:
    moments = iter([100.0, 101.0, 101.5, 161.5, 162.5])
    clock = AwakeClock(2.0, lambda: next(moments))
    assert [clock.look() for _ in range(4)] == [1.0, 1.5, 3.5, 4.5]
