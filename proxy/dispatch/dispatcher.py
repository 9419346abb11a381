"""All jobs under way in this proxy, and the route of worker messages to jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

from common.config import Settings
from common.messages import Abort, Encoded, Failed, FromWorker, InputNeeded, Prefilled, Tokens
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.job_runner import JobRunner
from proxy.dispatch.jobs import Job
from proxy.dispatch.placement import Placer
from proxy.dispatch.worker import Worker, WorkerEvent
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics, Timelines

_REMEMBERED: Final = 1024
"""Ended jobs whose worker was told to stop, so that each is told once."""


@dataclass(eq=False, repr=False)
class Dispatcher:
    """Starts jobs and routes worker messages and events to jobs."""

    _settings: Settings
    _metrics: ProxyMetrics
    _timelines: Timelines
    runners: dict[str, JobRunner] = field(default_factory=dict)
    """The jobs under way, by request id."""
    _disowned: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._placer = Placer(self._metrics)
        self.on_placed = self._placer.learn

    def run(self, pool: WorkerPool, job: Job, deadline_s: float) -> AsyncGenerator[Tokens]:
        """Return the tokens of a job. Closing the generator early aborts the job.

        `deadline_s` is by `time.monotonic`. Nothing happens before the first step. Raises as `JobRunner.tokens` does.
        """
        timeout_s = self._settings.handoff_timeout_s
        context = DispatchContext(pool, self._placer, self._metrics, timeout_s, self._timelines)
        return JobRunner(job, context, deadline_s, self.runners).tokens()

    def on_message(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Encoded | Prefilled):  # also after the last token
            self._timelines.add(message.request_id, message.spans)
            if message.error is None:
                self._metrics.handoffs.count()
        runner = self.runners.get(message.request_id)
        if runner is not None:
            runner.post(worker, message)
        elif not isinstance(message, Encoded | Failed):
            self._disown(worker, message)

    def _disown(self, worker: Worker, message: Tokens | Prefilled | InputNeeded) -> None:
        """Stop a worker on an ended job: the abort may have been lost with a connection."""
        over = isinstance(message, Prefilled) or (isinstance(message, Tokens) and message.done)
        if over or message.request_id in self._disowned:
            return
        self._disowned[message.request_id] = None
        while len(self._disowned) > _REMEMBERED:
            self._disowned.popitem(last=False)
        worker.notify(Abort(message.request_id))

    def requests_at(self, worker: Worker) -> list[str]:
        return [request_id for request_id, runner in self.runners.items() if runner.uses(worker)]

    def on_invalid(self) -> None:
        self._metrics.invalid_replies.inc()

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        for runner in self.runners.values():
            if event == "joined" or runner.uses(worker):
                runner.post(worker, event)
