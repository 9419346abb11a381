"""Autoscaling by seconds of outstanding work, which each worker tells in `services.process.work`'s unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

METRIC: Final = "outstanding_work_seconds"
SCALING_POLICY: Final = "launch.ray.scaling:OutstandingWork"


class OutstandingWork:
    """Serve's policy: as many replicas as give each `target_seconds` of the work that is outstanding.

    The work of all replicas is added up, of each its highest reading in the period that Serve looks back. Serve keeps
    the number within its bounds.
    """

    def __init__(self, target_seconds: float) -> None:
        self._target_s = target_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        readings: Mapping[Any, Any] = (context.raw_metrics or {}).get(METRIC) or {}
        total_s = sum(max(reading.value for reading in series) for series in readings.values() if series)
        return max(1, math.ceil(total_s / self._target_s)), {}
