"""Turns into a markdown page."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from launch.cluster.cpus import available_cores
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
    "latency p50 / p99, ms",
    "answers equal to the first row's",
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = [header, *rows]
    text = [f"| {' | '.join(map(str, cells))} |" for cells in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


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


def hardware() -> str:
    """The machine in words: what a reader needs to judge the figures."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    total = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return f"{available_cores()} cores of {model}, {total / 2**20:.0f} GiB"


def page(sections: Iterable[str], command: str, notes: Sequence[str], when: date) -> str:
    """The measured part of the page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "triptych"))
    facts = [f"Measured on {when:%Y-%m-%d}, {hardware()}; Python {platform.python_version()}, {versions}.", *notes]
    return "\n\n".join([" ".join(facts), f"```\n{command}\n```", *sections])


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
        _milliseconds([outcome.ttft_s for turn in turns for outcome in turn.outcomes]),
        _milliseconds([outcome.latency_s for turn in turns for outcome in turn.outcomes]),
        _share_equal(turns, first),
    )


def _median(turns: Sequence[Turn], value: Callable[[Turn], float]) -> float:
    return float(np.median([value(turn) for turn in turns]))


def _ratio(turns: Sequence[Turn], first: Sequence[Turn]) -> str:
    """Of the same repetition, so that what disturbed one disturbed the other."""
    ratios = [turn.requests_per_s / base.requests_per_s for turn, base in zip(turns, first, strict=True)]
    return f"{np.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def _milliseconds(values: Sequence[float | None]) -> str:
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


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
