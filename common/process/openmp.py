"""How the numeric threads of a process wait for each other. Has to be in the environment before torch is imported."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

DEFAULTS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Threads that wait go to sleep: workers that spin on shared cores starve each other. Before that they look so many
times, some tens of microseconds: within a step one parallel region follows the other."""


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables missing in the user's environment."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
