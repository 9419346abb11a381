"""Shared surroundings of all jobs: workers, placement, metrics, limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from common.errors import TriptychError
from common.telemetry import get_logger
from proxy.dispatch.placement import Placer, absent_s, missing
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics, Timelines

FIRST_LOOK_S: Final = 0.1
"""Pause between two looks for workers while a new proxy does not know them yet."""
log = get_logger()


@dataclass(frozen=True)
class DispatchContext:
    """Everything around a job. `handoff_timeout_s` is the longest wait for one step of a handoff."""

    pool: WorkerPool
    placer: Placer
    metrics: ProxyMetrics
    handoff_timeout_s: float
    timelines: Timelines = field(default_factory=Timelines)

    def is_full_wait(self, since_s: float) -> bool:
        """Whether a wait from `since_s` until now took at least half of the longest step of a handoff."""
        return time.monotonic() - since_s >= self.handoff_timeout_s / 2

    def wait_s(self) -> float:
        """Return how long to wait for the missing workers. Raises TriptychError("unavailable") after too long."""
        left_s = self.handoff_timeout_s - absent_s(self.pool)
        if left_s <= 0:
            raise TriptychError("unavailable", f"no {missing(self.pool)} is ready; try again shortly")
        return left_s if self.pool.has_looked else min(left_s, FIRST_LOOK_S)

    def count_retry(self, request_id: str, reason: str) -> None:
        """Count repeated work of a request."""
        self.metrics.retries.labels(reason).inc()
        log.debug("work is repeated", request=request_id, reason=reason)
