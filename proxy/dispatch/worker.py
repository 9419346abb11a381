"""A worker as seen by this proxy: registry entry, connection, load."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Literal

from broker.cluster.rpc import WorkerClient
from common.errors import TriptychError
from common.messages import InstanceRecord, ToWorker

WorkerEvent = Literal["joined", "gone"]
"""An event of a worker as a whole."""


@dataclass
class Load:
    """The work of this proxy on one worker: requests, their tokens at most, and items to encode."""

    requests: int = 0
    tokens: int = 0
    items: int = 0


@dataclass(eq=False)
class Worker:
    """One life of a worker process; a restarted worker is another `Worker`."""

    record: InstanceRecord
    client: WorkerClient
    load: Load = field(default_factory=Load)
    admitted: bool = False
    """Whether the worker may get work: it has been connected."""
    gone: bool = False
    missing_since_s: float | None = None
    """Time (monotonic) since which the worker has been missing in the registry."""

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    def send(self, message: ToWorker) -> None:
        """Send without waiting. Raises TriptychError("unavailable") for a worker that is gone or takes no messages.

        Raises as WorkerClient.send does for too large a message, which ends the request and not the worker.
        """
        if self.gone:
            raise TriptychError("unavailable", f"{self.instance_id} is gone")
        self.client.send(message)

    def notify(self, message: ToWorker) -> None:
        """Send a message that may be lost: a worker without connection learns from the silence of this proxy."""
        with contextlib.suppress(TriptychError):
            self.send(message)
