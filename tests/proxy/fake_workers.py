"""Workers without engines: real sockets, real messages, a real registry, answers from a script."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker.cluster.registry import Registry
from broker.cluster.rpc import WorkerServer, life_id
from common.errors import ErrorInfo
from common.messages import (
    Encode,
    Encoded,
    Failed,
    FromWorker,
    Generate,
    Heartbeat,
    InstanceRecord,
    Role,
    Span,
    ToWorker,
)

if TYPE_CHECKING:
    from tests.proxy.fake_cluster import FakeCluster

SILENT = "silent"


class FakeWorker:
    """Takes messages, remembers them in `received`, and handles each by `handle`."""

    def __init__(self, cluster: FakeCluster, role: Role, instance_id: str) -> None:
        self.cluster, self.role, self.id = cluster, role, instance_id
        self.received: list[ToWorker] = []
        self.proxies: list[bytes] = []
        self.errors: list[BaseException | None] = []
        self.alive = False
        self.epoch = time.time_ns()
        self.server = WorkerServer(cluster.context, life=life_id(instance_id, self.epoch))
        self.registry = Registry(cluster.redis, cluster.name)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, **changes: Any) -> None:
        values = {
            "fingerprint": self.cluster.info.fingerprint,
            "dtype": "float32",
            "http_address": "127.0.0.1:1",
            "requests_address": self.server.address,
            **changes,
        }
        self.record = InstanceRecord(
            instance_id=self.id,
            role=self.role,
            epoch=self.epoch,
            model=self.cluster.info.name,
            **values,
        )
        self.alive = True
        await self.registry.register(self.record)
        self.spawn(self._beat())
        self.spawn(self._receive())

    async def die(self, *, leave_entry: bool = False) -> None:
        """As a killed process: the socket closes at once. Its registry entry goes, too, or is left to expire."""
        if not self.alive:
            return
        self.alive = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.server.close()
        if not leave_entry:
            await self.registry.unregister()

    def of(self, kind: type, request_id: str | None = None) -> list:
        """The messages of a kind received so far, of one request or of all."""
        return [m for m in self.received if isinstance(m, kind) and request_id in (None, m.request_id)]

    def spawn(self, coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(task.exception())
            traceback.print_exception(task.exception())

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        raise AssertionError

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.registry.heartbeat()

    async def _receive(self) -> None:
        while True:
            proxy, message = await self.server.receive()
            if not isinstance(message, Heartbeat):
                self.received.append(message)
                self.proxies.append(proxy)
                self.spawn(self.handle(proxy, message))

    async def reply(self, proxy: bytes, message: FromWorker) -> None:
        self.server.send(proxy, message)


class FakeEncoder(FakeWorker):
    """Encodes by doing nothing. `script` returns None (done), an error, or SILENT."""

    script: Callable[[Encode], ErrorInfo | str | None] = staticmethod(lambda message: None)

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Generate):
            wrong = ErrorInfo("invalid_request", f"{self.id} is an encoder")
            await self.reply(proxy, Failed(message.request_id, wrong, message.attempt))
        if not isinstance(message, Encode):
            return
        outcome = self.script(message)
        if outcome == SILENT:
            return
        if outcome is None:
            reader = self.cluster.reader(message.destination)
            assert reader is not None
            reader.put_input(message.request_id, message.input_id)
        now = time.time()
        spans = [Span("encode", self.id, now - 0.01, now)]
        error = outcome if isinstance(outcome, ErrorInfo) else None
        self.server.send(
            proxy, Encoded(message.request_id, message.input_id, message.attempt, error=error, spans=spans)
        )
