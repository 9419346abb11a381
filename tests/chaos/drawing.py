"""Faults at moments that are drawn: any at all, or one for each cell of a matrix that covers every kind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from common.messages import Role
from tests.chaos.faults import BROKER, CUTS, Fault, Kind

FIRST_S: Final = 0.3
"""No fault is earlier: the first requests are on their way by then."""
LAST_S: Final = 3.0
WORKERS: Final[tuple[Role, ...]] = ("encoder", "prefill", "decode", "prefill_decode")
LINKS: Final[tuple[tuple[Role, Role], ...]] = (
    ("encoder", "prefill"),
    ("encoder", "prefill_decode"),
    ("prefill", "decode"),
)
"""From which role to which there are tensors."""
STOPS_S: Final = (10.0, 12.0)
CUTS_S: Final = (2.0, 12.0)
"""In the matrix: both sides of what anybody waits for a word from a worker or from a proxy."""


@dataclass(frozen=True)
class Cell:
    """One kind of round. `parts`: kinds, and targets in which a role in braces stands for a worker of it; `other_…` for
    another one.
    """

    group: str
    parts: tuple[tuple[Kind, str], ...]

    def __str__(self) -> str:
        return ", ".join(f"{kind} {target}" for kind, target in self.parts).replace("{", "").replace("}", "")

    @property
    def cuts_tensors(self) -> bool:
        """Whether tensors have to go through cables for it to make sense."""
        return any(target.startswith("<>") or "}>{" in target for _, target in self.parts)

    def draw(self, rng: random.Random, roles: Mapping[str, Role]) -> list[Fault]:
        """Its faults on these instances, roles by id, which have two workers of each role."""
        names = {}
        for role in WORKERS:
            ids = sorted(instance for instance in roles if roles[instance] == role)
            names[role], names[f"other_{role}"] = rng.sample(ids, 2)
        return [self._draw_one(rng, kind, target.format(**names)) for kind, target in self.parts]

    def _draw_one(self, rng: random.Random, kind: Kind, target: str) -> Fault:
        lasting = rng.uniform(*STOPS_S) if kind == "stop" else rng.uniform(*CUTS_S) if kind in CUTS else 0.0
        return Fault(kind, target, rng.uniform(FIRST_S, LAST_S), lasting)


def matrix() -> list[Cell]:
    """Every role and the broker killed and stopped, alone and in pairs; the broker emptied; every way to be cut off."""
    return [*_alone(), *_cuts(), *_pairs()]


def _alone() -> Iterator[Cell]:
    for role in (*WORKERS, "proxy", BROKER):
        for kind in _SIGNALS:
            yield Cell(f"{role} killed, stopped", ((kind, _one(role)),))
    for kind in _EMPTYING:
        yield Cell("broker emptied, restarted", ((kind, BROKER),))


def _pairs() -> Iterator[Cell]:
    for one, other in itertools.combinations((*WORKERS, "proxy", BROKER), 2):
        for kinds in itertools.product(_SIGNALS, repeat=2):
            yield Cell(f"{one} and {other}", ((kinds[0], _one(one)), (kinds[1], _one(other))))
    for role in WORKERS:
        for kinds in itertools.combinations_with_replacement(_SIGNALS, 2):
            yield Cell(f"two of {role}", ((kinds[0], _one(role)), (kinds[1], _one(f"other_{role}"))))


def _cuts() -> Iterator[Cell]:
    for mode in CUTS:
        for role in (*WORKERS, "proxy"):
            yield Cell(f"{role} from the broker", ((mode, f"{_one(role)}>broker"),))
        for role in WORKERS:
            yield Cell(f"{role} from those who connect to it", ((mode, f">{_one(role)}"),))
            yield Cell(f"{role} from everybody, both ways", ((mode, f"<>{_one(role)}"),))
        for sender, receiver in LINKS:
            yield Cell("one link between two workers", ((mode, f"{_one(sender)}>{_one(receiver)}"),))
    for number, (one, other) in enumerate(itertools.combinations(WORKERS, 2)):
        target = f"<>{_one(one)},{_one(other)}"
        yield Cell("two together from everybody else, both ways", ((CUTS[number % len(CUTS)], target),))


def _one(role: str) -> str:
    return role if role in ("proxy", BROKER) else f"{{{role}}}"


_SIGNALS: Final[tuple[Kind, ...]] = ("kill", "stop")
_EMPTYING: Final[tuple[Kind, ...]] = ("flush", "restart")


def draw_faults(rng: random.Random, instance_ids: Sequence[str], stop_s: float) -> list[Fault]:
    """One or two faults of any kind on any of the instances, the proxy and the broker."""
    faults = []
    for target in rng.sample([*instance_ids, BROKER], rng.choice((1, 1, 2))):
        kinds = (*_SIGNALS, *_EMPTYING) if target == BROKER else _SIGNALS
        kind = rng.choice(kinds)
        if target != BROKER and rng.random() < 0.5:
            ways = (f"{target}>broker",) if target == "proxy" else (f"{target}>broker", f">{target}", f"<>{target}")
            kind, target = rng.choice(CUTS), rng.choice(ways)
        lasting = rng.uniform(0.3, 1.0) * stop_s if kind not in ("kill", *_EMPTYING) else 0.0
        faults.append(Fault(kind, target, rng.uniform(FIRST_S, LAST_S), lasting))
    return faults
