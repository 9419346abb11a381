"""An SVG of a burst: the requests in flight, and the encoders that run, second by second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 640, 90, 50, 30, 50
_COLOURS: Final = ("#d55e00", "#0072b2")


@dataclass(frozen=True)
class Moment:
    """`seconds` after the burst began."""

    seconds: float
    in_flight: int
    encoders: int


def draw(moments: Sequence[Moment]) -> str:
    """Return the SVG document: one panel below the other, on one axis of time."""
    longest_s = moments[-1].seconds
    panels: list[tuple[str, Callable[[Moment], int]]] = [
        ("requests in flight, each with fresh pictures", lambda moment: moment.in_flight),
        ("encoder replicas that run", lambda moment: moment.encoders),
    ]
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH + _LEFT + 20}" height="{height}" fill="white"/>',
    ]
    for row, (title, value) in enumerate(panels):
        top, most = _TOP + row * (_HEIGHT + _GAP), max(value(moment) for moment in moments)
        bottom = top + _HEIGHT
        parts.append(f'<text x="{_LEFT}" y="{top - 8}">{title}</text>')
        for level in range(0, most + 1, max(1, most // 3)):
            y = bottom - _HEIGHT * level / most
            parts.append(f'<path d="M {_LEFT} {y:.1f} h {_WIDTH}" stroke="#ddd"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level}</text>')
        steps = [
            f"H {_LEFT + _WIDTH * moment.seconds / longest_s:.1f} V {bottom - _HEIGHT * value(moment) / most:.1f}"
            for before, moment in pairwise([Moment(0, 0, 0), *moments])
            if value(moment) != value(before)
        ]
        line = f"M {_LEFT} {bottom} {' '.join(steps)} H {_LEFT + _WIDTH}"
        parts.append(f'<path d="{line}" fill="none" stroke="{_COLOURS[row]}" stroke-width="2"/>')
    for second in range(0, int(longest_s) + 1, 10):
        x = _LEFT + _WIDTH * second / longest_s
        parts.append(f'<text x="{x:.1f}" y="{height - _GAP + 18}" text-anchor="middle">{second}</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH / 2}" y="{height - 12}" text-anchor="middle">seconds</text>')
    return "\n".join([*parts, "</svg>\n"])
