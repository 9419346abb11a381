"""Every job of this proxy that is under way, and the way of a worker's message to its job."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from common.config import Settings
from common.messages import Encoded, FromWorker
from proxy.flight import Flight, TokenBatch
from proxy.jobs import Job, response_id
from proxy.metrics import ProxyMetrics
from proxy.timeline import Timelines
from proxy.worker import Worker
from proxy.workers import WorkerPool


class Dispatcher:
    """Starts jobs and listens to the workers on their behalf."""

    def __init__(self, settings: Settings, metrics: ProxyMetrics, timelines: Timelines) -> None:
        self._settings = settings
        self._metrics = metrics
        self._timelines = timelines
        self._flights: dict[str, Flight] = {}

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    async def run(self, pool: WorkerPool, job: Job, deadline_s: float) -> AsyncGenerator[TokenBatch]:
        """The tokens of a job, to its end or until the caller closes this generator (then it is aborted everywhere).

        `deadline_s` is Unix time. Raises TriptychError as Flight does.
        """
        flight = Flight(
            job, pool, self._metrics, handoff_timeout_s=self._settings.handoff_timeout_s, deadline_s=deadline_s
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
        if isinstance(message, Encoded):  # may come after the last token, and still belongs to the timeline
            self._timelines.add(response_id(message.request_id), message.spans)
        flight = self._flights.get(message.request_id)
        if flight is not None:
            flight.post(worker, message)

    async def on_gone(self, worker: Worker) -> None:
        for flight in list(self._flights.values()):
            flight.post(worker, None)
