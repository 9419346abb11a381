"""One worker as this proxy sees it: its registry entry, the connection to it, what it has to do for us."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from broker.cluster.rpc import WorkerClient
from common.errors import TriptychError
from common.messages import InstanceRecord, ToWorker


class WorkerEvent(Enum):
    """What happens to a worker as a whole."""

    JOINED = "joined"
    GONE = "gone"


@dataclass
class Load:
    """What this proxy has under way on one worker: requests, the tokens of these at most, and items to encode."""

    requests: int = 0
    tokens: int = 0
    items: int = 0


@dataclass(eq=False)
class Worker:
    """One life of one worker process; a restarted worker is another `Worker`."""

    record: InstanceRecord
    client: WatchedClient
    load: Load = field(default_factory=Load)
    admitted: bool = False
    """Whether it may be given work: there has been a connection to it."""
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
        """Send without waiting. Raises TriptychError: "unavailable" where the worker takes nothing any more, and as
        WorkerClient.send does for what is too large, which ends the request and not the worker."""
        if self.gone:
            raise TriptychError("unavailable", f"{self.instance_id} is gone")
        await self.client.send(message)

    async def notify(self, message: ToWorker) -> None:
        """As `send`, where nothing is lost with a message: a worker that takes none is told by our silence."""
        with contextlib.suppress(TriptychError):
            await self.send(message)


class Claim:
    """One request's part of a worker's load, from now until `release`."""

    def __init__(self, worker: Worker, tokens: int) -> None:
        self.worker = worker
        self._tokens = tokens
        self._held = True
        worker.load.requests += 1
        worker.load.tokens += tokens

    def release(self) -> None:
        """Give it back; once is enough."""
        if self._held:
            self._held = False
            self.worker.load.requests -= 1
            self.worker.load.tokens -= self._tokens


class WatchedClient(WorkerClient):
    """A connection that tells when it is made, and when it is lost: the operating system closes a dead process's
    sockets at once, while its registry entry lives on for seconds."""

    connected = False
    """Whether it has been made, as far as `opened` has seen."""

    async def opened(self) -> bool:
        """Return once it is made, or (False) a try to make it was broken off; where nobody answers, never."""
        self.connected = await self._next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self.connected

    async def lost(self) -> None:
        """Return once it is lost."""
        while await self._next_event() != zmq.EVENT_DISCONNECTED:
            pass

    async def _next_event(self) -> int:
        return int(parse_monitor_message(await self._monitor.recv_multipart())["event"])

    def _watch(self, socket: zmq.asyncio.Socket) -> None:
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def close(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super().close(linger_ms)
