"""What a soak found, as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tools.bench.report import markdown
from tools.soak.memory import Life
from tools.soak.tally import Tally

MIB = 2**20
LOAD: Final = "load"
"""Ends the names of processes that ask, which are no part of the product: their memory is not judged."""
_HEADER: Final = ("process", "mean, MiB", "first", "last", "rise over the window, MiB", "%", "flat")


@dataclass(frozen=True)
class Part:
    """One cluster and its load. `name`: of the kind of its requests, too, a key of `asks.DRAWS`."""

    name: str
    model: str
    topology: str
    in_flight: int

    def __str__(self) -> str:
        return f"{self.name} ({self.model.rstrip('/').rpartition('/')[2]} as {self.topology}, {self.in_flight} at once)"


@dataclass(frozen=True)
class Plan:
    """`parts` run side by side. `fault_every_s`: the mean time between the faults of each; 0 for none."""

    minutes: float
    parts: tuple[Part, ...]
    fault_every_s: float
    seed: int

    @property
    def seconds(self) -> float:
        return 60 * self.minutes


@dataclass(frozen=True)
class Findings:
    """Everything a run found. `tallies` and `faults`: of each part of the plan.

    `lives` are those of all processes; `spared` names those that nothing hit and that are therefore to be found there.
    `left` is what was still held two seconds after the last request; `remains` what was there after the end of the
    clusters: processes, files. `kept` are the folders of logs that supervisors keep on purpose, and why.
    """

    plan: Plan
    tallies: list[Tally]
    faults: list[Counter[str]]
    restarts: dict[str, int]
    spared: list[str]
    lives: list[Life]
    left: dict[str, float]
    remains: list[str]
    kept: list[str]

    @property
    def failures(self) -> list[str]:
        """What the run has failed by, in words."""
        lived = {life.name for life in self.lives}
        risen = [life for life in self.lives if _is_judged(life) and not life.flat]
        found = [f"memory of {life.name} rose by {100 * life.rise / life.mean:.2f} %" for life in risen]
        found += [f"{name} did not live through the window" for name in self.spared if name not in lived]
        found += [f"{name} ended though nothing had hit it" for name in self.spared if self.restarts.get(name)]
        for part, tally in zip(self.plan.parts, self.tallies, strict=True):
            found += [f"{part.name}: {tally.failures} wrong or missing answers"] * bool(tally.failures)
            found += [f"{part.name}: no whole answer"] * (not tally.endings.get("whole"))
        found += [f"still held: {_listed(self.left)}"] * bool(self.left)
        return found + [f"left behind: {_listed(self.remains)}"] * bool(self.remains)


def as_markdown(findings: Findings) -> str:
    """Return the page: what was done, what came of it, memory by process."""
    plan, failures = findings.plan, findings.failures
    restarted = {name: count for name, count in findings.restarts.items() if count}
    lines = [
        f"{datetime.now(tz=UTC):%Y-%m-%d}, {plan.minutes:g} minutes of {' and '.join(map(str, plan.parts))}, "
        f"seed {plan.seed}: **{'FAILED: ' + '; '.join(failures) if failures else 'ok'}**",
        "",
        *map(_part_line, plan.parts, findings.tallies, findings.faults),
        f"- processes started again: {_listed(restarted)}",
        f"- held 2 s after the last request: {_listed(findings.left)}; after the end: {_listed(findings.remains)}",
        f"- logs that supervisors keep: {_listed(findings.kept)}",
        "",
        markdown(_HEADER, map(_row, findings.lives)),
        "",
        *(f"- {what}" for tally in findings.tallies for what in tally.told),
    ]
    return "\n".join(lines) + "\n"


def _part_line(part: Part, tally: Tally, faults: Counter[str]) -> str:
    endings = ", ".join(f"{count} {ending}" for ending, count in sorted(tally.endings.items()))
    return (
        f"- {part.name}: {endings}; {tally.tokens} tokens; compared with an earlier answer to the same request: "
        f"{tally.compared}, different: {tally.wrong}; faults: {_listed(dict(sorted(faults.items())))}"
    )


def _is_judged(life: Life) -> bool:
    return not life.name.endswith(f" {LOAD}")


def _row(life: Life) -> list[str]:
    numbers = (life.mean, life.sizes[0], life.sizes[-1], life.rise)
    verdict = ("yes" if life.flat else "NO") if _is_judged(life) else "not judged"
    return [life.name, *(f"{n / MIB:.1f}" for n in numbers), f"{100 * life.rise / life.mean:+.2f}", verdict]


def _listed(items: Mapping[str, float] | list[str]) -> str:
    if isinstance(items, Mapping):
        items = [f"{name}: {value:g}" for name, value in items.items()]
    return ", ".join(items) or "nothing"
