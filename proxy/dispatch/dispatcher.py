"""Every job of this proxy that is under way, and the way of a worker's message to its job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from common.config import Settings
from common.messages import Abort, Encoded, Failed, FromWorker, InputNeeded, Prefilled, Tokens
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.job_runner import JobRunner
from proxy.dispatch.jobs import Job, response_id
from proxy.dispatch.placement import Placer
from proxy.dispatch.worker import Worker, WorkerEvent
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics
from proxy.server.timeline import Timelines

_REMEMBERED: Final = 1024
"""Ended jobs that a worker has been told of, so that it is told once."""


class Dispatcher:
    """Starts jobs and listens to the workers on their behalf."""

    def __init__(self, settings: Settings, metrics: ProxyMetrics, timelines: Timelines) -> None:
        self._settings = settings
        self._metrics = metrics
        self._timelines = timelines
        self._placer = Placer(metrics)
        self._flights: dict[str, JobRunner] = {}
        self._disowned: OrderedDict[str, None] = OrderedDict()

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    async def run(self, pool: WorkerPool, job: Job, deadline_s: float) -> AsyncGenerator[Tokens]:
        """The tokens of a job, to its end or until the caller closes this generator (then it is aborted everywhere).

        `deadline_s` is by `time.monotonic`. Raises TriptychError as Flight does.
        """
        flight = JobRunner(
            job, DispatchContext(pool, self._placer, self._metrics, self._settings.handoff_timeout_s), deadline_s
        )
        self._flights[job.request_id] = flight
        self._metrics.flights.inc()
        try:
            async with aclosing(flight.batches()) as batches:
                async for batch in batches:
                    self._timelines.add(response_id(job.request_id), batch.spans)
                    yield batch
        finally:
            del self._flights[job.request_id]
            self._metrics.flights.dec()

    async def on_message(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Encoded | Prefilled):  # may come after the last token, and still belongs to the timeline
            self._timelines.add(response_id(message.request_id), message.spans)
        flight = self._flights.get(message.request_id)
        if flight is not None:
            if not flight.post(worker, message):
                await flight.abandon()
        elif not isinstance(message, Encoded | Failed):
            await self._disown(worker, message)

    async def _disown(self, worker: Worker, message: Tokens | Prefilled | InputNeeded) -> None:
        """Stop a worker that is still at a job that has ended here: its abort may have been lost with a connection."""
        over = isinstance(message, Prefilled) or (isinstance(message, Tokens) and message.done)
        if over or message.request_id in self._disowned:
            return
        self._disowned[message.request_id] = None
        while len(self._disowned) > _REMEMBERED:
            self._disowned.popitem(last=False)
        await worker.tell(Abort(message.request_id))

    def requests_at(self, worker: Worker) -> list[str]:
        return [request_id for request_id, flight in self._flights.items() if flight.uses(worker)]

    def on_invalid(self) -> None:
        self._metrics.invalid_replies.inc()

    def on_joined(self, worker: Worker) -> None:
        for flight in self._flights.values():
            flight.post(worker, WorkerEvent.JOINED)

    async def on_gone(self, worker: Worker) -> None:
        for flight in list(self._flights.values()):
            flight.post(worker, WorkerEvent.GONE)
