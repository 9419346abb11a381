"""What a job finds around it: the workers, who chooses among them, the limits."""

from __future__ import annotations

import time
from dataclasses import dataclass

from proxy.dispatch.placement import Placer
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics


@dataclass(frozen=True)
class DispatchContext:
    """`handoff_timeout_s` is the longest wait for one step of a handoff."""

    pool: WorkerPool
    placer: Placer
    metrics: ProxyMetrics
    handoff_timeout_s: float

    def is_full_wait(self, since_s: float) -> bool:
        """Whether a wait that ends now, begun at `since_s`, was as long as one step of a handoff may take,
        or nearly."""
        return time.monotonic() - since_s >= self.handoff_timeout_s / 2

    def patience_s(self, absent_s: float) -> float:
        """How much longer to wait for the last worker of a role, missing for `absent_s`: a supervisor brings it back in
        seconds. It is given up where nothing is left.
        """
        return self.handoff_timeout_s - absent_s
