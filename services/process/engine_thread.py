"""The only thread of an engine. Two queues connect the thread and the asyncio loop:

    loop  -- commands (inbound queue) -->  engine thread  -- events (outbound queue) -->  loop

The thread sleeps on the inbound queue while the engine has no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from common.errors import TriptychError
from common.telemetry import get_logger

_MAX_WAIT_S: Final = 3600.0
"""Longest sleep without a look at the engine; the queue cannot wait for centuries."""

log = get_logger()


class Engine(Protocol):
    """The interface of both engines."""

    def has_work(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...


E = TypeVar("E", bound=Engine)
Event = TypeVar("Event")
T = TypeVar("T")


class EngineThread(Generic[E, Event]):
    """Builds an engine on a new thread and drives the engine: run commands, step, queue events.

    `loaded` ends when the engine is built, `ended` with the thread: with None after `stop`, or the exception that
    killed it.
    """

    def __init__(
        self,
        build: Callable[[], E],
        step: Callable[[E], list[Event]],
        next_deadline_s: Callable[[E], float | None],
        answer: Callable[[E], list[Event]] | None = None,
    ) -> None:
        """`step` and `next_deadline_s` (by `time.monotonic`) run on the engine's thread.

        `answer`, if any, runs between commands and step: the answers go out before the step computes.
        """
        self._build = build
        self._step = step
        self._answer = answer
        self._next_deadline_s = next_deadline_s
        self._loop = asyncio.get_running_loop()
        self._inbound: queue.SimpleQueue[Callable[[E], None] | None] = queue.SimpleQueue()
        self.events: asyncio.Queue[list[Event]] = asyncio.Queue()
        """The events of each step, in the order of steps. For a single reader."""
        self._busy_since_s: float | None = None
        self.worked_s = 0.0
        """Seconds of all turns that have ended."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[E], None]) -> None:
        """Queue a command. A raised TriptychError is logged; any other exception ends the thread."""
        self._inbound.put(command)

    async def call(self, function: Callable[[E], T], timeout_s: float) -> T:
        """Run `function` between two steps and return the result. Raises TimeoutError after `timeout_s`."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def command(engine: E) -> None:
            self._post(partial(_settle, answer, function(engine)))

        self.submit(command)
        async with asyncio.timeout(timeout_s):
            return await answer

    def stop(self) -> None:
        """Ask the thread to end after the present step; later commands are discarded."""
        self._inbound.put(None)

    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended, for `timeout_s` at most. Return whether the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """How long the current turn (commands and step) has lasted; 0 while the thread waits."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            engine = self._build()
            self._post(partial(_settle, self.loaded, None))
            while self._turn(engine):
                pass
        except BaseException as caught:
            error = caught
            log.error("the engine thread has died", exc_info=not isinstance(caught, TriptychError))
        finally:
            self._post(partial(_settle, self.ended, error))

    def _turn(self, engine: E) -> bool:
        commands = self._pop_commands(engine)
        since_s = self._busy_since_s = time.monotonic()
        for command in commands:
            if command is None:
                return False
            try:
                command(engine)
            except TriptychError as error:
                log.warning("the engine refused a command", error=error.info.message)
        for produce in (self._answer, self._step):
            if produce is not None and (events := produce(engine)):
                self._post(partial(self.events.put_nowait, events))
        self._busy_since_s = None
        self.worked_s += time.monotonic() - since_s
        return True

    def _pop_commands(self, engine: E) -> list[Callable[[E], None] | None]:
        """Return all queued commands; an idle engine waits for a command or for its next deadline."""
        commands = []
        with contextlib.suppress(queue.Empty):
            if not engine.has_work():
                deadline_s = self._next_deadline_s(engine)
                timeout_s = None if deadline_s is None else min(max(0.0, deadline_s - time.monotonic()), _MAX_WAIT_S)
                commands.append(self._inbound.get(timeout=timeout_s))
            while True:
                commands.append(self._inbound.get_nowait())
        return commands

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(callback)


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)
