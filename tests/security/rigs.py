"""What serves from a loop on a thread of its own, for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def on_a_thread(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `make()` gives in a loop on another thread, entered and left there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    async def enter() -> tuple[AbstractAsyncContextManager[T], T]:
        manager = make()
        return manager, await manager.__aenter__()

    manager, value = asyncio.run_coroutine_threadsafe(enter(), loop).result(30)
    try:
        yield value
    finally:
        leaving = manager.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(_awaited(leaving), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _awaited(leaving: Any) -> None:
    await leaving
