"""One instance of a local cluster as its supervisor sees it, and who tells a person about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common.messages import Role
from launch.cluster.backoff import Backoff
from launch.cluster.children import Child, Command
from services.process.drain_marker import DrainMarker
from services.worker import with_role

State = Literal["starting", "ready", "draining", "switching", "restarting", "left", "stopped"]
"""On purpose: `draining` until everything under way is done, then `left` for good, or `switching` to another role."""


@dataclass
class Instance:
    """A worker or the proxy: how it is started, where it is reached, and how it is doing."""

    id: str
    role: Role
    command: Command
    state: State = "starting"
    child: Child | None = None
    started_s: float = 0.0
    restarts: int = 0
    http_address: str = ""
    requests_address: str = ""
    tensor_address: str = ""
    next_role: Role | None = None
    """Of one that is draining: what it wants to come back as; None where it wants to leave."""
    note: DrainMarker = field(default_factory=DrainMarker)
    """Says the same once its process has ended."""
    epoch: int | None = None
    past_epoch: int | None = None
    """The epoch of a former life: its registry entry outlives a killed process by a few seconds."""
    backoff: Backoff = field(default_factory=Backoff)

    def take_role(self, role: Role) -> None:
        """The process has changed its role by itself: what starts it again has to know."""
        self.role, self.next_role, self.past_epoch, self.started_s = role, None, self.epoch, time.monotonic()
        self.command = replace(self.command, argv=with_role(self.command.argv, role))

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None and self.child.running else None

    @property
    def joined(self) -> bool:
        """Whether the present process, in its present role, has been seen in the registry."""
        return self.epoch != self.past_epoch

    @property
    def awaited(self) -> bool:
        """Whether a cluster that starts waits for this one: not if somebody has told it to leave meanwhile."""
        return self.state not in ("ready", "draining", "left")

    @property
    def age_s(self) -> float:
        """Seconds since the present process was started."""
        return time.monotonic() - self.started_s


class Reporter:
    """Listener to a cluster's supervisor; this base class is silent."""

    def starting(self, instances: Sequence[Instance], logs: Path) -> None:
        """All instances are about to start; `logs` is the folder of their logs."""

    def waiting(self, instances: Sequence[Instance], elapsed_s: float) -> None:
        """How far the instances are; called several times a second while the cluster starts."""

    def started(self, instances: Sequence[Instance], base_url: str, elapsed_s: float) -> None:
        """The cluster answers requests."""

    def died(self, instance: Instance, how: str, log_tail: str, retry_in_s: float) -> None:
        """A process ended that should not have; it is started again in a moment."""

    def recovered(self, instance: Instance) -> None:
        """A process that had been started again is ready."""

    def draining(self, instance: Instance) -> None:
        """Somebody has told an instance to finish what it has, and to leave or to change its role."""

    def left(self, instance: Instance, how: str | None) -> None:
        """It has ended; nothing takes its place. `how`, where that was before it had finished what it had."""

    def switched(self, instance: Instance) -> None:
        """It is ready again, in the role that it has now."""

    def broker_died(self, log_tail: str) -> None:
        """The broker that the cluster runs for itself has ended; an empty one takes its place at once."""

    def broker_failed(self, why: str, retry_in_s: float) -> None:
        """It could not be started again; that is tried once more in a moment."""

    def broker_recovered(self) -> None:
        """It runs again, after tries that failed."""

    def stopping(self, instances: Sequence[Instance]) -> None:
        """The cluster is being taken down, with these instances; none where nothing was started."""

    def stopped(self, killed: Sequence[str], kept_logs: str | None) -> None:
        """Nothing runs any more. Which instances had to be killed, and the folder of logs if it was kept."""
