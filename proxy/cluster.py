"""What a job finds around it: the workers, who chooses among them, the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.metrics import ProxyMetrics
from proxy.placement import Placer
from proxy.workers import WorkerPool

RETURN_S: Final = 15.0
"""The last worker of a role is waited for so long: a supervisor brings it back in seconds."""


@dataclass(frozen=True)
class Cluster:
    """`handoff_timeout_s` is the longest wait for one step of a handoff."""

    pool: WorkerPool
    placer: Placer
    metrics: ProxyMetrics
    handoff_timeout_s: float

    def patience_s(self, absent_s: float) -> float:
        """How much longer to wait for a worker that has been missing for `absent_s`; not above 0: it is given up."""
        return min(self.handoff_timeout_s, RETURN_S) - absent_s
