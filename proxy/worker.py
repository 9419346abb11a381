"""One worker as this proxy sees it: its registry entry, the connection to it, what it has to do for us."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from broker.rpc import WorkerClient
from common.errors import TriptychError
from common.messages import InstanceRecord, ToWorker


@dataclass
class Load:
    """What this proxy has under way on one worker: requests (items on an encoder) and their tokens (bytes)."""

    requests: int = 0
    size: int = 0


@dataclass(eq=False)
class Worker:
    """One life of one worker process; a restarted worker is another `Worker`."""

    record: InstanceRecord
    client: WatchedClient
    load: Load = field(default_factory=Load)
    gone: bool = False
    missing_since_s: float | None = None
    """Since when (monotonic) it has not been in the registry."""

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def life(self) -> tuple[str, int]:
        """What tells this process from the one that will be started after it under the same id."""
        return self.record.instance_id, self.record.epoch

    async def send(self, message: ToWorker) -> None:
        """Send without waiting. Raises TriptychError("unavailable") where the worker takes nothing any more."""
        if self.gone:
            raise TriptychError("unavailable", f"{self.instance_id} is gone")
        await self.client.send(message)


class WatchedClient(WorkerClient):
    """A connection that tells when it is lost: the operating system closes a dead process's sockets at once, while
    its registry entry lives on for seconds."""

    def __init__(self, context: zmq.asyncio.Context, address: str, identity: str) -> None:
        super().__init__(context, address, identity)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def lost(self) -> None:
        """Return once the connection, which had been there, is lost."""
        await self._monitor.recv_multipart()

    def close(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super().close(linger_ms)
