"""What a soak found, as a page and as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from launch.soak.load import Tally
from launch.soak.memory import Life
from launch.soak.plan import Part, Plan

MIB = 2**20


@dataclass(frozen=True)
class Findings:
    """Everything a run found. `tallies` and `faults`: of each part of the plan. `left` is what was still held two
    seconds after the last request; `remains` what was there after the end of the clusters: processes, files.
    """

    plan: Plan
    tallies: list[Tally]
    faults: list[Counter[str]]
    restarts: dict[str, int]
    lives: list[Life]
    left: dict[str, float]
    remains: list[str]

    @property
    def ok(self) -> bool:
        flat = bool(self.lives) and all(life.flat for life in self.lives)
        return flat and not (any(tally.failures for tally in self.tallies) or self.left or self.remains)


def as_json(findings: Findings) -> dict[str, Any]:
    """All numbers, samples included."""
    plan = findings.plan
    sides = zip(plan.parts, findings.tallies, findings.faults, strict=True)
    return {
        "verdict": "ok" if findings.ok else "failed",
        "minutes": plan.minutes,
        "seed": plan.seed,
        "parts": {part.name: _part_as_json(part, tally, faults) for part, tally, faults in sides},
        "restarts": findings.restarts,
        "left": findings.left,
        "remains": findings.remains,
        "memory": [
            {"name": life.name, "mean": life.mean, "rise": life.rise, "seconds": life.times_s, "bytes": life.sizes}
            for life in findings.lives
        ],
    }


def _part_as_json(part: Part, tally: Tally, faults: Counter[str]) -> dict[str, Any]:
    return {
        "model": part.model,
        "topology": part.topology,
        "in_flight": part.in_flight,
        "endings": dict(tally.endings),
        "tokens": tally.tokens,
        "compared": tally.compared,
        "wrong": tally.wrong,
        "told": tally.told,
        "faults": dict(faults),
    }


def as_markdown(findings: Findings) -> str:
    """The page: what was done, what came of it, memory by process."""
    plan = findings.plan
    lines = [
        f"{datetime.now(tz=UTC):%Y-%m-%d}, {plan.minutes:g} minutes of {' and '.join(map(str, plan.parts))}, "
        f"seed {plan.seed}: **{'ok' if findings.ok else 'FAILED'}**",
        "",
    ]
    for part, tally, faults in zip(plan.parts, findings.tallies, findings.faults, strict=True):
        lines += _part_lines(part, tally, faults)
    lines += [
        f"- processes started again: {_listed({name: count for name, count in findings.restarts.items() if count})}",
        f"- held 2 s after the last request: {_listed(findings.left)}; after the end: {_listed(findings.remains)}",
        "",
        "| process | mean, MiB | first | last | rise over the window, MiB | % | flat |",
        "|---|---|---|---|---|---|---|",
        *map(_row, findings.lives),
        *(f"- {what}" for tally in findings.tallies for what in tally.told),
    ]
    return "\n".join(lines) + "\n"


def _part_lines(part: Part, tally: Tally, faults: Counter[str]) -> list[str]:
    endings = ", ".join(f"{count} {ending}" for ending, count in sorted(tally.endings.items()))
    return [
        f"- {part.name}: {endings}; {tally.tokens} tokens; compared with an earlier answer to the same request: "
        f"{tally.compared}, different: {tally.wrong}; faults: {_listed(dict(sorted(faults.items())))}",
    ]


def _row(life: Life) -> str:
    numbers = (life.mean, life.sizes[0], life.sizes[-1], life.rise)
    cells = [f"{number / MIB:.1f}" for number in numbers]
    return (
        f"| {life.name} | {' | '.join(cells)} | {100 * life.rise / life.mean:+.2f} | {'yes' if life.flat else 'NO'} |"
    )


def _listed(items: Mapping[str, float] | list[str]) -> str:
    if isinstance(items, Mapping):
        items = [f"{name}: {value:g}" for name, value in items.items()]
    return ", ".join(items) or "nothing"
