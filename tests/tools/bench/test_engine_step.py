"""The benchmark of one step counts every part once."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_models import make_llama
from tools.bench.engine_step import PARTS, PartClock, main


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


def test_the_table_has_a_row_for_each_number_in_flight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(make_llama(tmp_path / "model")), in_flight="1,3", threads=1, prompt_tokens=8, steps=4)
    rows = [
        line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 |", "| 3 |"))
    ]
    assert [int(row[0]) for row in rows] == [1, 3]
    assert all(len(row) == len(PARTS) + 4 and float(row[1]) > 0 for row in rows)
