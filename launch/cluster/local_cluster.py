"""A whole cluster on this machine, for synchronous programs: tests, the demo, notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from common.config import Settings
from common.errors import TriptychError
from launch.cluster.instance import Instance, Reporter
from launch.cluster.plan import make_plan
from launch.cluster.supervisor import START_TIMEOUT_S, Supervisor
from launch.cluster.topology import Topology

STOP_DEADLINE_S = 10.0


class LocalCluster:
    """A running cluster for the length of a `with` block.

    with LocalCluster(Settings(model="signpost", port=0), "1e1pd") as cluster:
        client = openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key="none")

    The supervisor runs in an event loop on a thread of its own, so dead workers are replaced meanwhile.
    """

    def __init__(
        self,
        settings: Settings,
        topology: str | Topology | None = None,
        *,
        reporter: Reporter | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Plan the cluster. Raises TriptychError as `make_plan` does."""
        self.supervisor = Supervisor(make_plan(settings, topology), reporter, start_timeout_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)

    @property
    def base_url(self) -> str:
        """Base URL of the OpenAI API, without `/v1`."""
        return self.supervisor.plan.base_url

    @property
    def instances(self) -> dict[str, Instance]:
        """The instances by id, with present state, process and addresses."""
        return {instance.id: instance for instance in self.supervisor.instances}

    @property
    def broker_url(self) -> str:
        """The redis:// URL of the broker. Raises TriptychError("unavailable") before `start` has set the URL."""
        url = self.supervisor.broker_url
        if url is None:
            raise TriptychError("unavailable", "the cluster's broker has not been started yet: call start() first")
        return url

    def start(self) -> None:
        """Return once every instance is ready. On TriptychError no process is left running."""
        self._thread.start()
        try:
            self._run(self.supervisor.start(), asyncio.Task.cancel)
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """End all processes within five seconds."""
        try:
            self._run(self.supervisor.stop(), lambda _: self.supervisor.kill_now())
        finally:
            self._close()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, work: Coroutine[Any, Any, None], interrupt: Callable[[asyncio.Task[None]], object]) -> None:
        """Run `work` in the supervisor's loop. Ctrl-C here becomes `interrupt` there; the clean-up is awaited."""
        finished = threading.Event()
        tasks: list[asyncio.Task[None]] = []

        async def run() -> None:
            tasks.append(asyncio.ensure_future(work))
            try:
                await tasks[0]
            finally:
                finished.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            future.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(lambda: [interrupt(task) for task in tasks])
            finished.wait(STOP_DEADLINE_S)
            raise

    def _close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
