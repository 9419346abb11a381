"""`python -m tools.gpu_check.report gpu-check.json`: what a GPU check has measured, for docs/lab/benchmarks.md.

    python -m tools.gpu_check.report build/gpu-check/gpu-check.json                             printed
    python -m tools.gpu_check.report build/gpu-check/gpu-check.json --write docs/lab/benchmarks.md  between its marks

A gap to the limit has a reason, which only a person can tell: it is taken from a JSON file of {"benchmark, case":
"reason"} (--reasons), and stands as open where there is none, and where no limit is known. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tools.bench.pages import write_between
from tools.gpu_check.figures import Figure

BEGIN, END = "<!-- measured on a GPU: begin -->", "<!-- measured on a GPU: end -->"
_HEADER: Final = (
    "| case | median | spread | limit | share of limit | beside it | reason of the gap |\n|---|---|---|---|---|---|---|"
)
_LIMITS: Final = "limits"
_NEAR: Final = 0.9
"""A share of its limit that leaves no gap to explain."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the section or write it into a page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.report", description=__doc__.split("\n")[0])
    parser.add_argument("checks", type=Path, nargs="+", help="gpu-check.json of one call or of several")
    parser.add_argument("--reasons", type=Path, help='JSON of {"benchmark, case": "reason of the gap"}')
    parser.add_argument("--write", type=Path, help="a page to write into, between its marks")
    options = parser.parse_args(arguments)
    reasons = {} if options.reasons is None else json.loads(options.reasons.read_text())
    written = section([json.loads(path.read_text()) for path in options.checks], reasons)
    if options.write is None:
        print(written)
    else:
        write_into(options.write, written)
    return 0


def section(checks: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> str:
    """The date and hardware of each check, what it has measured of its machine, and a table for each benchmark."""
    figures = _latest(checks)
    parts = [*(_head(check) for check in checks), *_fallbacks(figures)]
    names = dict.fromkeys(figure.benchmark for figure in figures if figure.benchmark != _LIMITS)
    for name in names:
        rows = [_row(figure, reasons) for figure in figures if figure.benchmark == name]
        parts.append("\n".join([f"### On a GPU: {name}", "", _HEADER, *rows]))
    return "\n\n".join(parts)


def write_into(path: Path, written: str) -> None:
    """Replace what stands between the two marks of a page. Raises ValueError where it has none."""
    write_between(path, BEGIN, END, written)


def _head(check: Mapping[str, Any]) -> str:
    stages = {stage["stage"]: stage for stage in check["stages"]}
    when = f"Measured on {datetime.fromisoformat(check['when']):%Y-%m-%d}"
    hardware = stages.get("environment", {}).get("found", "hardware not asked for in this call")
    decided = [f"`{name}` {stage['verdict']}" for name, stage in stages.items() if stage["decides"]]
    limits = {row.case: row for stage in check["stages"] for row in _figures(stage) if row.benchmark == _LIMITS}
    measured = "; ".join(f"{row.case}: {row.value:.4g} {row.unit}" for row in limits.values())
    sentences = [f"{when}: {hardware}."]
    sentences += [f"Checked: {', '.join(decided)}."] if decided else []
    sentences += [f"Its limits, measured in the same run: {measured}."] if measured else []
    return " ".join(sentences)


def _fallbacks(figures: Sequence[Figure]) -> list[str]:
    """A paragraph that names what was measured with something else than was to be measured."""
    names = dict.fromkeys(figure.benchmark for figure in figures if figure.is_fallback)
    told = ", ".join(f"`{name}`" for name in names)
    return [f"**Measured on a fallback**, because what should have computed did not run: {told}."] if names else []


def _latest(checks: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Of all checks, the last figure of each case; a failure does not take the place of a number."""
    found: dict[tuple[str, str, str], Figure] = {}
    for check in checks:
        for stage in check["stages"]:
            for figure in _figures(stage):
                key = (figure.benchmark, figure.case, figure.unit)
                if not figure.failed or key not in found:
                    found[key] = figure
    return list(found.values())


def _figures(stage: Mapping[str, Any]) -> list[Figure]:
    return [Figure(**figure) for figure in stage.get("figures", ())]


def _row(figure: Figure, reasons: Mapping[str, str]) -> str:
    """The cells of the figure without its benchmark, and why it is not at its limit."""
    cells = figure.row().split(" | ", 1)[1].removesuffix(" |")
    return f"| {cells} | {_reason(figure, reasons)} |"


def _reason(figure: Figure, reasons: Mapping[str, str]) -> str:
    told = reasons.get(f"{figure.benchmark}, {figure.case}")
    if told is not None:
        return told
    near = figure.share is not None and figure.share >= _NEAR
    return "–" if figure.failed or near else "open"


if __name__ == "__main__":
    sys.exit(main())
