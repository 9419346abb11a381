"""Items of several streams at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

MAX_AHEAD: Final = 256
"""Items that may wait for the reader: one that does not read stops those who produce."""

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T]], *, in_order: bool = False) -> AsyncGenerator[tuple[int, T]]:
    """Read all streams at once, and yield each item with the number of its stream. At the end all streams are closed.

    Items come in the order of arrival, read at most MAX_AHEAD ahead; or `in_order`, the streams one after the other,
    while the items of later streams wait. The first exception of a stream ends all.
    """
    together: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(MAX_AHEAD)
    queues = [asyncio.Queue[tuple[int, T] | Exception | None]() if in_order else together for _ in streams]

    async def read(number: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queues[number].put((number, item))
            await queues[number].put(None)
        except Exception as error:  # raised again by the reader
            for queue in {*queues}:
                await queue.put(error)

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        for queue in queues:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
