"""What a soak is going to do: which clusters it loads with what, for how long, and how often something breaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launch.soak.asks import Ask, draw_chats, draw_transcriptions


@dataclass(frozen=True)
class Part:
    """One cluster and its load. `draw`: endless requests for the model that the cluster calls by this name."""

    name: str
    model: str
    topology: str
    in_flight: int
    draw: Callable[[str, random.Random], Iterator[Ask]]

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


def pictures(model: str, topology: str, in_flight: int) -> Part:
    """Chats about pictures and text."""
    return Part("pictures", model, topology, in_flight, draw_chats)


def audio(model: str, topology: str, in_flight: int) -> Part:
    """Clips to transcribe."""
    return Part("audio", model, topology, in_flight, draw_transcriptions)
