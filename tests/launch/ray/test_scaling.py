"""How many replicas a role should have: by the seconds of work that its workers have before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.ray.scaling import METRIC, OutstandingWork


@dataclass
class Context:
    """Of Serve's, what the policy reads."""

    raw_metrics: dict[str, dict[str, list[SimpleNamespace]]] = field(default_factory=dict)


def desired(*seconds: float, target_s: float = 2.0) -> int:
    series = {f"r{n}": [SimpleNamespace(value=s), SimpleNamespace(value=s / 2)] for n, s in enumerate(seconds)}
    return OutstandingWork(target_s)(cast(Any, Context({METRIC: series})))[0]


@pytest.mark.parametrize(
    ("seconds", "replicas"),
    [((), 1), ((0.0,), 1), ((1.9,), 1), ((2.1,), 2), ((9.0, 1.0), 5), ((0.0, 0.0, 0.0), 1)],
)
def test_the_highest_readings_of_all_replicas_are_shared_out_by_the_target(seconds, replicas):
    assert desired(*seconds) == replicas


def test_a_replica_without_a_reading_counts_as_idle():
    context = Context({METRIC: {"new": [], "old": [SimpleNamespace(value=3.0)]}})
    assert OutstandingWork(1.0)(cast(Any, context))[0] == 3
