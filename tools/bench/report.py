"""Turns into a markdown page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from tools.bench.measure import Turn
from tools.bench.workloads import Workload

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_HEADER = (
    "in flight",
    "system",
    "requests/s",
    "tokens/s out",
    "requests/s against the first row (spread)",
    "TTFT p50 / p99, ms",
    "TPOT p50 / p99, ms",
    "latency p50 / p99, ms",
    "answers equal to the first row's",
)


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    return "\n".join([row(header), "|" + "---|" * len(header), *map(row, rows)])


def row(cells: Sequence[object]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(workload: Workload, turns: Sequence[Turn]) -> str:
    """One workload: a row per number in flight and system; medians over repetitions, ratios with their spread."""
    rows: list[Sequence[object]] = []
    systems = list(dict.fromkeys(turn.system for turn in turns if turn.repetition == 0))
    for in_flight in dict.fromkeys(turn.in_flight for turn in turns):
        first = _turns_of(turns, in_flight, systems[0])
        rows += [_row(in_flight, system, _turns_of(turns, in_flight, system), first) for system in systems]
    return f"### {workload.name}: {workload.unit}\n\n{markdown(_HEADER, rows)}"


def hop_table(hops: Mapping[str, Sequence[float]]) -> str:
    """The way of one input through the handoff."""
    rows = []
    for hop, seconds in hops.items():
        if seconds:
            p50, p90 = np.percentile(seconds, (50, 90)) * 1000
            rows.append((hop.replace("_", " ").replace("->", "→"), f"{p50:.2f}", f"{p90:.2f}"))
    return markdown(("hop", "p50, ms", "p90, ms"), rows)


def page(sections: Iterable[str], command: str | None, notes: Sequence[str], when: date) -> str:
    """Return the measured part of a page: where, by which command, and the sections."""
    from tools.gpu_check import environment  # imports torch, which the soak has no use for

    facts = [f"Measured on {when:%Y-%m-%d}: {environment.in_words()}.", *notes]
    shown = [f"```\n{command}\n```"] if command is not None else []
    return "\n\n".join([" ".join(facts), *shown, *sections])


def write_into(path: Path, measured: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the text between the two marks of a page. Raise ValueError where the page has none."""
    text = path.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{path} has no lines {begin} and {end} to write between")
    before, _, rest = text.partition(begin)
    path.write_text(f"{before}{begin}\n\n{measured}\n\n{end}{rest.partition(end)[2]}")


def _turns_of(turns: Sequence[Turn], in_flight: int, system: str) -> list[Turn]:
    return [turn for turn in turns if turn.in_flight == in_flight and turn.system == system]


def _row(in_flight: int, system: str, turns: Sequence[Turn], first: Sequence[Turn]) -> Sequence[object]:
    return (
        in_flight,
        system,
        f"{_median(turns, lambda turn: turn.requests_per_s):.2f}",
        f"{_median(turns, lambda turn: turn.tokens_per_s):.1f}",
        _ratio(turns, first),
        milliseconds([outcome.ttft_s for turn in turns for outcome in turn.outcomes]),
        milliseconds([outcome.tpot_s for turn in turns for outcome in turn.outcomes if outcome.ttft_s is not None]),
        milliseconds([outcome.latency_s for turn in turns for outcome in turn.outcomes]),
        _share_equal(turns, first),
    )


def _median(turns: Sequence[Turn], value: Callable[[Turn], float]) -> float:
    return float(np.median([value(turn) for turn in turns]))


def _ratio(turns: Sequence[Turn], first: Sequence[Turn]) -> str:
    """Of the same repetition, so that what disturbed one disturbed the other."""
    ratios = [turn.requests_per_s / base.requests_per_s for turn, base in zip(turns, first, strict=True)]
    return f"{np.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def milliseconds(values: Sequence[float | None]) -> str:
    """Return `p50 / p99` of seconds; a dash where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    p50, p99 = np.percentile(known, (50, 99)) * 1000
    return f"{p50:.0f} / {p99:.0f}"


def _share_equal(turns: Sequence[Turn], first: Sequence[Turn]) -> str:
    pairs = [
        (mine.text.strip(), theirs.text.strip())
        for turn, base in zip(turns, first, strict=True)
        for mine, theirs in zip(turn.outcomes, base.outcomes, strict=True)
    ]
    return f"{sum(mine == theirs for mine, theirs in pairs)} of {len(pairs)}"
