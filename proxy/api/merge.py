"""Several token streams merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

MAX_AHEAD: Final = 256
"""Items that may wait for the reader: one that does not read stops those who produce."""

T = TypeVar("T")


async def merge(generators: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all generators as they come, with the generator's index, at most MAX_AHEAD ahead of the
    reader.

    The first exception of any ends the whole; by whatever way this ends, all of them are closed.
    """
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(MAX_AHEAD)
    tasks = [asyncio.create_task(_pump(index, generator, queue)) for index, generator in enumerate(generators)]
    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generator in generators:  # those whose task was cancelled before it began
            await generator.aclose()


async def _pump(
    index: int, generator: AsyncGenerator[T], queue: asyncio.Queue[tuple[int, T] | BaseException | None]
) -> None:
    try:
        async with aclosing(generator):
            async for item in generator:
                await queue.put((index, item))
        await queue.put(None)
    except Exception as error:  # raised again by the reader
        await queue.put(error)
