"""Turns become the page: medians, ratios of the same repetition, percentiles, equality."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tools.bench.client import Outcome
from tools.bench.measure import Turn
from tools.bench.report import BEGIN, END, hop_table, page, table, write_into
from tools.bench.workloads import make_workload


def turn(system: str, repetition: int, wall_s: float, text: str = "a") -> Turn:
    outcomes = [Outcome(text, 10, wall_s, ttft_s=wall_s / 2) for _ in range(4)]
    return Turn(system, 4, repetition, wall_s, outcomes)


def test_ratios_compare_turns_of_the_same_repetition() -> None:
    turns = [turn("one", 0, 1.0), turn("two", 0, 2.0), turn("two", 1, 4.0, "b"), turn("one", 1, 4.0)]
    lines = table(make_workload("signpost"), turns).splitlines()
    assert lines[-2] == "| 4 | one | 2.50 | 25.0 | 1.00 (1.00–1.00) | 1250 / 2000 | 139 / 222 | 2500 / 4000 | 8 of 8 |"
    assert lines[-1] == "| 4 | two | 1.50 | 15.0 | 0.75 (0.50–1.00) | 1500 / 2000 | 167 / 222 | 3000 / 4000 | 4 of 8 |"


def test_every_row_has_as_many_cells_as_the_header() -> None:
    header, rule, *rows = table(make_workload("signpost"), [turn("one", 0, 1.0)]).splitlines()[2:]
    assert {line.count("|") for line in (header, rule, *rows)} == {10}


def test_hops_without_values_are_left_out() -> None:
    text = hop_table({"offer_sent -> granted": [0.001, 0.003], "granted -> stored": []})
    assert "| offer sent → granted | 2.00 | 2.80 |" in text
    assert "stored" not in text


def test_the_page_is_written_between_its_marks_and_can_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for number in range(2):
        write_into(path, page([f"table {number}"], "make bench", ["A busy machine."], date(2026, 11, 21)))
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"table 1\n\n{END}\nafter\n")
    assert "old" not in text
    assert "table 0" not in text
    assert "Measured on 2026-11-21" in text
    assert "A busy machine." in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines"):
        write_into(path, "x")
