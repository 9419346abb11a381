"""The timeline of a request in bars on the terminal: stage, instance, begin and length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

_COLOURS = {
    "proxy": "white",
    "preprocess": "cyan",
    "grant": "yellow",
    "encode": "blue",
    "handoff": "magenta",
    "queue": "yellow",
    "inputs": "bright_black",
    "prefill": "green",
    "decode": "bright_green",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def timeline_table(spans: Sequence[dict[str, Any]], width: int = 40) -> Table:
    """Return a table with a row per span (`stage`, `instance`, `start_s`, `end_s`), drawn over `width` cells."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    if not spans:
        return table
    ordered = sorted(spans, key=lambda span: (span["start_s"], span["end_s"]))
    first_s, last_s = ordered[0]["start_s"], max(span["end_s"] for span in ordered)
    per_cell_s = max(last_s - first_s, 1e-6) / width
    for span in ordered:
        start_s, length_s = span["start_s"] - first_s, span["end_s"] - span["start_s"]
        colour = _COLOURS.get(span["stage"], "white")
        bar = draw_bar(start_s / per_cell_s, length_s / per_cell_s)
        when, length = f"at {1000 * start_s:.1f}", f"{1000 * length_s:.1f} ms"
        table.add_row(Text(span["stage"], colour), Text(span["instance"], "dim"), when, length, Text(bar, colour))
    return table


def draw_bar(start: float, length: float) -> str:
    """Return a bar from cell `start` over `length` cells, precise to an eighth of a cell; never invisible.

    Cells have no glyphs that begin in the middle, so the start is rounded down and the length keeps its value.
    """
    eighths = max(1, round(8 * length))
    return " " * int(start) + _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
