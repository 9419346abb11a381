"""An instance of a local cluster in the supervisor's view, and the listener that informs a person."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common.messages import Role
from common.process.start_phase import read_phase
from launch.cluster.children import Backoff, Child, Command
from services.process.drain import DrainMarker
from services.worker import with_role

State = Literal["starting", "ready", "draining", "switching", "restarting", "left", "stopped"]
"""On purpose: `draining` until everything under way is done, then `left` for good, or `switching` to another role."""


@dataclass
class Instance:
    """A worker or the proxy: command, addresses and present state."""

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
    phase_file: Path | None = None
    epoch: int | None = None
    past_epoch: int | None = None
    """The epoch of a former life: its registry entry outlives a killed process by a few seconds."""
    backoff: Backoff = field(default_factory=Backoff)

    def take_role(self, role: Role) -> None:
        """Record a role change made by the process, for any later start."""
        self.role, self.next_role, self.past_epoch, self.started_s = role, None, self.epoch, time.monotonic()
        self.command = replace(self.command, argv=with_role(self.command.argv, role))

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None and self.child.running else None

    @property
    def phase(self) -> str:
        """The work of a starting process now, such as `reading weights 40 %`."""
        return read_phase(self.phase_file)

    @property
    def joined(self) -> bool:
        """Whether the registry has shown the present process in the present role."""
        return self.epoch != self.past_epoch

    @property
    def awaited(self) -> bool:
        """Whether a starting cluster waits for this instance; false after a request to leave."""
        return self.state not in ("ready", "draining", "left")

    @property
    def age_s(self) -> float:
        """Seconds since the present process was started."""
        return time.monotonic() - self.started_s


class Reporter:
    """Listener to a cluster's supervisor; this base class is silent."""

    def starting(self, instances: Sequence[Instance], logs: Path) -> None:
        """All instances are about to start; `logs` is the folder of log files."""

    def waiting(self, instances: Sequence[Instance], elapsed_s: float) -> None:
        """How far the instances are; called several times a second while the cluster starts."""

    def started(self, instances: Sequence[Instance], base_url: str, elapsed_s: float) -> None:
        """The cluster answers requests."""

    def event(self, text: str, *, good: bool | None = None, log_tail: str = "", then: str = "") -> None:
        """A process has ended, come back, begun to drain, left or changed its role, or the broker has ended.

        `good` is None for what is neither good nor bad, `log_tail` the last lines of a log, `then` the next step.
        """

    def stopping(self, instances: Sequence[Instance]) -> None:
        """The cluster is being taken down, with these instances; none if nothing was started."""

    def stopped(self, killed: Sequence[str], kept_logs: str | None) -> None:
        """All processes have ended. `killed` names instances ended by force, `kept_logs` the folder of kept logs."""
