"""What a job finds around it: the workers, who chooses among them, the limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.dispatch.placement import Placer
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics
from proxy.server.timeline import Timelines

if TYPE_CHECKING:
    from proxy.dispatch.job_runner import JobRunner


@dataclass(frozen=True)
class DispatchContext:
    """`handoff_timeout_s` is the longest wait for one step of a handoff."""

    pool: WorkerPool
    placer: Placer
    metrics: ProxyMetrics
    handoff_timeout_s: float
    timelines: Timelines = field(default_factory=Timelines)
    runners: dict[str, JobRunner] = field(default_factory=dict)
    """The jobs under way, by request id: each enters and removes itself."""

    def is_full_wait(self, since_s: float) -> bool:
        """Whether a wait that ends now, begun at `since_s`, was as long as one step of a handoff may take,
        or nearly."""
        return time.monotonic() - since_s >= self.handoff_timeout_s / 2

    def patience_s(self, absent_s: float) -> float:
        """How much longer to wait for the last worker of a role, missing for `absent_s`: a supervisor brings it back in
        seconds. It is given up where nothing is left.
        """
        return self.handoff_timeout_s - absent_s
