"""An SVG of a benchmark: the share of requests within a time, a panel per metric and a line per level of load.

Written by hand, because a plotting package for one kind of picture would be a hundred MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from launch.bench.figures import Run

PANELS: Final = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "inter-token latency",
    "request_latency": "request latency",
}
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 260, 200, 50, 50, 40


def draw(runs: Sequence[Run], title: str) -> str:
    """Return the SVG document."""
    width = _LEFT + len(PANELS) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 60 + 18 * len(runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for column, (metric, name) in enumerate(PANELS.items()):
        parts += _panel(runs, metric, name, _LEFT + column * (_WIDTH + _GAP))
    for row, run in enumerate(runs):
        y = _TOP + _HEIGHT + 60 + 18 * row
        colour = _COLOURS[row % len(_COLOURS)]
        parts.append(f'<path d="M {_LEFT} {y - 4} h 24" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{_LEFT + 32}" y="{y}">{escape(run.level)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(runs: Sequence[Run], metric: str, name: str, left: float) -> list[str]:
    """One panel: milliseconds from 0 to a round number to the right, 0 to 100 % of the requests upwards."""
    values = [sorted(run.values(metric)) for run in runs]
    most = _round_up(max((series[-1] for series in values if series), default=1.0))
    bottom = _TOP + _HEIGHT
    parts = [f'<text x="{left}" y="{_TOP - 8}">{name}, ms</text>']
    for quarter in range(5):
        x, y = left + _WIDTH * quarter / 4, bottom - _HEIGHT * quarter / 4
        parts.append(f'<path d="M {left} {y} h {_WIDTH} M {x} {_TOP} v {_HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{most * quarter / 4:g}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{25 * quarter}</text>')
    for row, series in enumerate(values):
        if series:
            steps = [
                f"H {left + _WIDTH * value / most:.1f} V {bottom - _HEIGHT * (rank + 1) / len(series):.1f}"
                for rank, value in enumerate(series)
            ]
            colour = _COLOURS[row % len(_COLOURS)]
            line = f"M {left} {bottom} {' '.join(steps)}"
            parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 6, 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if value <= step * power * (1 + 1e-9))
