"""How the numeric threads of a process wait for each other. Has to be in the environment before torch is imported."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

DEFAULTS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Threads that wait go to sleep: several workers that spin on shared cores starve each other (a linear layer of 0.1 ms
took 8 to 20). Before that they look so many times, some tens of microseconds: within a step one parallel region follows
the other, and waking up two hundred times a step cost a quarter of a decode step of one sequence on two cores."""


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables missing in the user's environment."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
