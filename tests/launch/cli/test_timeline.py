"""The timeline's bars."""

from __future__ import annotations

import io

from rich.console import Console

from launch.cli.answers import draw_bar, timeline_table


def test_a_bar_begins_at_its_cell_and_keeps_its_length() -> None:
    assert draw_bar(0, 3) == "███"
    assert draw_bar(2, 1.5) == "  █▌"
    assert draw_bar(4.9, 0.0001) == "    ▏"


def test_stages_are_drawn_in_order_on_one_scale() -> None:
    spans = [
        {"stage": "decode", "instance": "pd0", "start_s": 100.5, "end_s": 101.0},
        {"stage": "encode", "instance": "e0", "start_s": 100.0, "end_s": 100.5},
    ]
    output = io.StringIO()
    Console(file=output, width=100).print(timeline_table(spans, width=20))
    first, second = output.getvalue().splitlines()
    assert first.split() == ["encode", "e0", "at", "0.0", "500.0", "ms", "█" * 10]
    assert second.split() == ["decode", "pd0", "at", "500.0", "500.0", "ms", "█" * 10]
    assert second.index("█") - first.index("█") == 10


def test_no_spans_draw_nothing() -> None:
    assert timeline_table([]).row_count == 0
