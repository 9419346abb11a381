"""Items of several streams at once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

MAX_AHEAD: Final = 256
"""Items that may wait for the reader: one that does not read stops those who produce."""

T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncGenerator[T]], *, in_order: bool = False
) -> AsyncGenerator[tuple[int, T]]:
    """Read all streams at once, and yield each item with the number of its stream. At the end all streams are closed.

    Items come in the order of arrival, or `in_order`, the streams one after the other, while the items of later streams
    are kept. At most MAX_AHEAD are not read yet. The first exception of a stream ends all.
    """
    queue = asyncio.Queue[tuple[int, T | Exception | None]](MAX_AHEAD)

    async def read(number: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((number, item))
            await queue.put((number, None))
        except Exception as error:  # raised again by the reader
            await queue.put((number, error))

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    turn, ended, kept = 0, set[int](), defaultdict[int, list[T]](list)
    try:
        while len(ended) < len(streams):
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended.add(number)
            elif in_order and number != turn:
                kept[number].append(item)
            else:
                yield number, item
            while in_order and turn in ended and turn + 1 < len(streams):
                turn += 1
                for waiting in kept.pop(turn, ()):
                    yield turn, waiting
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
