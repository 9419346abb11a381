"""The supervisor of a local cluster: starts all processes, waits for them, replaces the dead, ends all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from broker.cluster.embedded import EmbeddedBroker
from common.errors import TriptychError
from launch.cluster.children import Backoff, Child
from launch.cluster.instance import Instance, Reporter, State
from launch.cluster.log_folders import LogFolder
from launch.cluster.plan import Plan
from launch.cluster.readiness import ReadinessProbe, check_broker, forget_instances
from launch.cluster.startup_deadlines import StartupDeadlines

STOP_GRACE_S = 3.0
"""Time for a clean stop before a process is killed; with what follows, a stop stays under five seconds."""
START_TIMEOUT_S = 300.0
_POLL_S = 0.1
_BROKER_PAUSE_S = 3.0
"""The longest between two tries to start the broker again: without it nobody can enter the cluster."""
_BROKER_TRY_S = 30.0
"""A broker that has not come up by then, empty as it is, hangs; a loaded machine may need some seconds."""
_WATCH_S = 1.0


class Supervisor:
    """The processes of a `Plan`, all handled in a single event loop.

    `start`, then `watch` until something ends it, then `stop`; `kill_now` cuts a stop short.
    """

    def __init__(self, plan: Plan, reporter: Reporter | None = None, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self.plan = plan
        self.instances: list[Instance] = []
        self.broker_url = plan.settings.broker
        """None until the embedded broker runs, where none was given."""
        self._reporter = reporter or Reporter()
        self._start_timeout_s = start_timeout_s
        self._overdue = StartupDeadlines(start_timeout_s, max(start_timeout_s, plan.settings.step_timeout_s))
        self._verdicts: dict[str, str] = {}  # why the present process of an instance was killed
        self._broker: EmbeddedBroker | None = None
        self._logs: LogFolder | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._broker_keeper: asyncio.Task[None] | None = None
        self._readiness: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._up = False
        self._failed = False

    @property
    def broker_pid(self) -> int | None:
        """The process of the embedded broker; None with a foreign broker."""
        return self._broker.pid if self._broker is not None else None

    @property
    def logs(self) -> Path | None:
        """The folder of the log files; None before the start."""
        return self._logs.path if self._logs is not None else None

    @property
    def stopping(self) -> bool:
        """Whether the stop has begun: afterwards only `kill_now` hastens the end."""
        return self._stop.is_set()

    async def start(self) -> None:
        """Start all processes and return once all instances are ready.

        Raises TriptychError, with nothing left running, where one ends before it is ready or the deadline passes.
        """
        began = time.monotonic()
        try:
            self.broker_url = broker_url = await self._prepare()
            self._keepers = [asyncio.create_task(self._keep(instance)) for instance in self.instances]
            self._readiness = asyncio.create_task(self._watch_readiness(broker_url))
            await self._wait_until_ready(began)
        except BaseException as error:
            self._failed = isinstance(error, Exception)  # and not a person's Ctrl-C
            await self.stop()
            raise
        self._up = True
        self._reporter.started(self.instances, self.plan.base_url, time.monotonic() - began)

    async def watch(self) -> None:
        """Return only by raising TriptychError("unavailable"), where the cluster cannot go on."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if (error := self._failure()) is not None:
                self._failed = True
                raise TriptychError("unavailable", f"the processes are looked after no more: {error!r}") from error

    async def stop(self) -> None:
        """End every process within five seconds; remove the cluster's files and broker entries."""
        self._reporter.stopping([instance for instance in self.instances if instance.state != "left"])
        self._stop.set()
        killed = await self._end_processes()
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.gather(self._readiness, return_exceptions=True)
        await self._leave_broker()
        keep_logs = self._failed or bool(killed) or any(instance.state == "restarting" for instance in self.instances)
        if self._logs is not None:
            self._logs.close(keep=keep_logs)
        for instance in self.instances:
            instance.state = "stopped"
        self._reporter.stopped(killed, str(self._logs.path) if self._logs and keep_logs else None)

    def kill_now(self) -> None:
        """End every process at once; `stop` goes on and cleans up."""
        for instance in self.instances:
            if instance.child is not None:
                instance.child.kill()

    async def _prepare(self) -> str:
        """Start the broker unless its URL was given, plan the instances; return the broker's URL."""
        broker_url = self.plan.settings.broker
        if broker_url is None:
            self._broker = EmbeddedBroker()
            broker_url = self._broker.start()
            self._broker_keeper = asyncio.create_task(self._keep_broker(self._broker))
        else:
            await check_broker(broker_url, self.plan)
        self._logs = LogFolder()
        self.instances = self.plan.instances(broker_url, self._logs.path)
        self._reporter.starting(self.instances, self._logs.path)
        return broker_url

    async def _keep(self, instance: Instance) -> None:
        """Run an instance until the cluster stops or the instance is told to leave. After every other end start the
        process again, in the role planned next.

        Raises TriptychError("unavailable") for an end while the cluster starts.
        """
        while not self._stop.is_set():
            how = await self._run_once(instance)
            if (why := self._verdicts.pop(instance.id, None)) is not None:
                how = f"{how}: {why}"
            if self._stop.is_set():
                return
            lived_s = instance.age_s
            if instance.note.exists:  # it may have been told so only a moment ago, or with no broker to tell of it
                instance.state, instance.next_role = "draining", instance.note.next_role
            if instance.state == "draining" and instance.next_role is None:
                instance.state, instance.past_epoch = "left", instance.epoch
                if instance.child is not None and instance.child.ended_well:
                    self._reporter.event(f"{instance.id} has left", good=True)
                else:
                    text = f"{instance.id} died while it was leaving ({how})"
                    self._reporter.event(text, good=False, then="nothing takes its place")
                return
            if instance.next_role is not None:
                instance.take_role(instance.next_role)
            instance.state, instance.past_epoch = "restarting", instance.epoch
            last_lines = instance.child.log_tail() if instance.child is not None else ""
            if not self._up:
                text = f"{instance.id} ended before it was ready ({how})\n{_indent(last_lines)}"
                raise TriptychError("unavailable", text)
            delay_s = instance.backoff.after_life_of(lived_s)
            then = f"starting it again in {delay_s:g} s"
            self._reporter.event(
                f"{instance.id} died ({how}). Its last lines:", good=False, log_tail=last_lines, then=then
            )
            await self._stopped_within(delay_s)
            instance.restarts += 1

    async def _keep_broker(self, broker: EmbeddedBroker) -> None:
        """Start the broker again, empty, after every unexpected end: the instances register themselves anew.

        Raises TriptychError("unavailable") where it does not come back.
        """
        backoff, began_s = Backoff(first_s=_POLL_S, longest_s=_BROKER_PAUSE_S), time.monotonic()
        while not self._stop.is_set():
            if broker.running:
                await asyncio.sleep(_POLL_S)
                continue
            text = "the broker died; an empty one takes its place. Its last lines:"
            self._reporter.event(text, good=False, log_tail=broker.log_tail())
            await self._bring_back(broker, backoff, time.monotonic() - began_s)
            began_s = time.monotonic()

    async def _bring_back(self, broker: EmbeddedBroker, backoff: Backoff, lived_s: float) -> None:
        """Try to start the broker until the broker runs or the cluster stops: obstacles may pass.

        Raises TriptychError("unavailable"), that of the last try, which begins before a start has taken too long.
        """
        ends_s, delay_s, num_failed = time.monotonic() + self._start_timeout_s, backoff.after_life_of(lived_s), 0
        while not await self._stopped_within(delay_s):
            try:
                await asyncio.to_thread(broker.restart, min(self._start_timeout_s, _BROKER_TRY_S))
            except (TriptychError, RuntimeError) as error:  # the latter where there can be no thread for it
                delay_s = backoff.after_life_of(0.0)
                if self._stop.is_set():
                    return
                if time.monotonic() + delay_s > ends_s:
                    raise
                num_failed += 1
                why = error.info.message if isinstance(error, TriptychError) else str(error)
                text, then = "the broker cannot be started again:", f"trying once more in {delay_s:g} s"
                self._reporter.event(text, good=False, log_tail=why, then=then)
            else:
                if num_failed:
                    self._reporter.event("the broker is back", good=True)
                return

    async def _stopped_within(self, delay_s: float) -> bool:
        """Wait until the cluster stops, at most `delay_s`; return whether the cluster stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), delay_s)
        return self._stop.is_set()

    async def _run_once(self, instance: Instance) -> str:
        """Run the process of an instance from start to end; return the manner of the end."""
        instance.started_s = time.monotonic()
        instance.note.remove()
        try:
            instance.child = await Child.start(instance.command)
        except TriptychError as error:  # no memory or no process slots: it may work a little later
            return error.info.message
        instance.state = "starting"
        if self._stop.is_set():
            instance.child.terminate()
        try:
            return await instance.child.wait()
        finally:
            if instance.phase_file is not None:  # of this process; kept logs are logs alone
                instance.phase_file.unlink(missing_ok=True)

    async def _watch_readiness(self, broker_url: str) -> None:
        """Follow the instances, at the start and later, as they become ready or leave on request."""
        async with ReadinessProbe(broker_url, self.plan.settings.cluster) as probe:
            while not self._stop.is_set():
                for instance, state in await probe.changes(self.instances):
                    self._note(instance, state)
                if self._up:
                    heard = await probe.heard(self.instances)
                    for late, why in self._overdue.look(self.instances, heard, broker_away=probe.broker_away):
                        assert late.child is not None
                        self._verdicts[late.id] = why
                        late.child.kill()  # a new process replaces it
                await asyncio.sleep(_POLL_S if not self._up else 5 * _POLL_S)

    def _note(self, instance: Instance, state: State) -> None:
        before, instance.state = instance.state, state
        if state == "draining":
            self._reporter.event(f"{instance.id} is draining: it finishes what it has")
        elif state == "ready" and before == "switching":
            self._reporter.event(f"{instance.id} has the role {instance.role} now (pid {instance.pid})", good=True)
        elif state == "ready" and self._up:
            life = f"pid {instance.pid}, ready after {instance.age_s:.1f} s, restart {instance.restarts}"
            self._reporter.event(f"{instance.id} is back ({life})", good=True)

    async def _wait_until_ready(self, began: float) -> None:
        while any(instance.awaited for instance in self.instances):
            elapsed_s = time.monotonic() - began
            self._reporter.waiting(self.instances, elapsed_s)
            if (error := self._failure()) is not None:
                raise error
            if elapsed_s > self._start_timeout_s:
                raise TriptychError("timeout", self._describe_delay())
            await asyncio.sleep(_POLL_S)

    def _failure(self) -> BaseException | None:
        """Return the exception of an ended keeper task: no other task takes over."""
        tasks = (self._readiness, self._broker_keeper, *self._keepers)
        ended = [task for task in tasks if task is not None and task.done() and not task.cancelled()]
        return next(filter(None, (task.exception() for task in ended)), None)

    def _describe_delay(self) -> str:
        """Name the instances not ready in time, with the last lines of each log."""
        late = [instance for instance in self.instances if instance.awaited]
        names = ", ".join(instance.id for instance in late)
        logs = [f"{i.id}:\n{_indent(i.child.log_tail())}" for i in late if i.child is not None]
        return f"not ready within {self._start_timeout_s:g} s: {names}\n" + "\n".join(logs)

    async def _end_processes(self) -> list[str]:
        """Send SIGTERM to all processes at once, and SIGKILL to the late; return the ids of the late."""
        for instance in self.instances:
            if instance.child is not None:
                instance.child.terminate()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=STOP_GRACE_S)
        killed = [i.id for i in self.instances if i.child is not None and i.child.running]
        self.kill_now()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        return killed

    async def _leave_broker(self) -> None:
        if self._broker is not None:
            await asyncio.to_thread(self._broker.stop)  # also ends a try to start it again
            if self._broker_keeper is not None:
                await asyncio.gather(self._broker_keeper, return_exceptions=True)
        elif self.plan.settings.broker is not None and self.instances:
            await forget_instances(self.plan.settings.broker, self.plan.settings.cluster, self.instances)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (it wrote nothing)"
