"""Items of several tasks, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Generic, ParamSpec, Self, TypeVar

MAX_AHEAD: Final = 256
"""Items that may wait for the reader: one that does not read stops those who produce."""

T = TypeVar("T")
P = ParamSpec("P")


class Merge(Generic[T]):
    """Reads what several producers `put`, at most MAX_AHEAD items ahead of the reader; used with `async with`.

    The first exception of a producer is raised in the reader. All producers are cancelled at the end of the context.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(MAX_AHEAD)
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = 0

    def start(self, produce: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a producer beside all others."""
        self._num_running += 1
        self._tasks.append(asyncio.create_task(self._run(produce, *args, **kwargs)))

    async def put(self, item: T) -> None:
        """Add an item, once there is room."""
        await self._queue.put(item)

    async def _run(self, produce: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await produce(*args, **kwargs)
            await self._queue.put(None)
        except Exception as error:  # raised again by the reader
            await self._queue.put(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while self._num_running:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._num_running -= 1
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
