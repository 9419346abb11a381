"""The benchmark of one step counts every part once, and input preparation stays within reach of its target."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from launch.bench.engine_step import PartClock, measure_preparation


def test_a_part_within_a_part_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    inner = SimpleNamespace(call=lambda: "done")
    outer = SimpleNamespace(call=lambda: inner.call())
    clock = PartClock()
    with clock.on(outer, "call", "outer"), clock.on(inner, "call", "inner"):
        assert outer.call() == "done"  # readings 0 (outer), 1 and 2 (inner), 3 (outer)
    assert clock.seconds == {"inner": 1.0, "outer": 2.0}
    outer.call()
    assert clock.seconds == {"inner": 1.0, "outer": 2.0}  # nothing is counted after the block


def test_input_preparation_grows_no_faster_than_the_batch() -> None:
    small, large = (min(a + b for a, b in zip(*measure_preparation(count, 30), strict=True)) for count in (64, 256))
    assert large < 8 * small
    assert large < 150e-6 * 10  # the target is 150 us on a quiet core; a shared one may take its time
