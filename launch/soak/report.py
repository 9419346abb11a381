"""What a soak found, as a page and as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from launch.soak.load import Tally
from launch.soak.memory import Life

MIB = 2**20


@dataclass(frozen=True)
class Findings:
    """Everything a run found. `left` is what was still held two seconds after the last request; `remains` what was
    there after the end of the cluster: processes, files.
    """

    minutes: float
    model: str
    topology: str
    in_flight: int
    seed: int
    tally: Tally
    faults: Counter[str]
    restarts: dict[str, int]
    lives: list[Life]
    left: dict[str, float]
    remains: list[str]

    @property
    def ok(self) -> bool:
        flat = bool(self.lives) and all(life.flat for life in self.lives)
        return flat and not (self.tally.failures or self.left or self.remains)


def as_json(findings: Findings) -> dict[str, Any]:
    """All numbers, samples included."""
    tally = findings.tally
    return {
        "verdict": "ok" if findings.ok else "failed",
        "minutes": findings.minutes,
        "model": findings.model,
        "topology": findings.topology,
        "in_flight": findings.in_flight,
        "seed": findings.seed,
        "endings": dict(tally.endings),
        "tokens": tally.tokens,
        "compared": tally.compared,
        "wrong": tally.wrong,
        "told": tally.told,
        "faults": dict(findings.faults),
        "restarts": findings.restarts,
        "left": findings.left,
        "remains": findings.remains,
        "memory": [
            {"name": life.name, "mean": life.mean, "rise": life.rise, "seconds": life.times_s, "bytes": life.sizes}
            for life in findings.lives
        ],
    }


def as_markdown(findings: Findings) -> str:
    """The page: what was done, what came of it, memory by process."""
    tally = findings.tally
    endings = ", ".join(f"{count} {ending}" for ending, count in sorted(tally.endings.items()))
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(findings.faults.items())) or "none"
    restarts = ", ".join(f"{name} {count}" for name, count in findings.restarts.items() if count) or "none"
    lines = [
        f"{datetime.now(tz=UTC):%Y-%m-%d}, {findings.minutes:g} minutes of {findings.model} as {findings.topology}, "
        f"{findings.in_flight} requests in flight, seed {findings.seed}: **{'ok' if findings.ok else 'FAILED'}**",
        "",
        f"- requests: {endings}; {tally.tokens} tokens",
        f"- answers compared with an earlier one to the same request: {tally.compared}, different: {tally.wrong}",
        f"- faults: {faults}; processes started again: {restarts}",
        f"- held 2 s after the last request: {_listed(findings.left)}; after the end: {_listed(findings.remains)}",
        "",
        "| process | mean, MiB | first | last | rise over the window, MiB | % | flat |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(life) for life in findings.lives]
    return "\n".join([*lines, *(f"- {what}" for what in tally.told)]) + "\n"


def _row(life: Life) -> str:
    numbers = (life.mean, life.sizes[0], life.sizes[-1], life.rise)
    cells = [f"{number / MIB:.1f}" for number in numbers]
    return (
        f"| {life.name} | {' | '.join(cells)} | {100 * life.rise / life.mean:+.2f} | {'yes' if life.flat else 'NO'} |"
    )


def _listed(items: dict[str, float] | list[str]) -> str:
    if isinstance(items, dict):
        items = [f"{name}: {value:g}" for name, value in items.items()]
    return ", ".join(items) or "nothing"
