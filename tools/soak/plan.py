"""What a soak is going to do: which clusters it loads with what, for how long, and how often something breaks."""

from __future__ import annotations

from dataclasses import dataclass


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
