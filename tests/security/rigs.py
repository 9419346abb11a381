"""What serves from a loop on a thread of its own, for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from broker.redis_client import connect
from tests.proxy.conftest import Rig, serving

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


@contextmanager
def threaded_rig(broker_url: str, model: Path | str, **fields: Any) -> Iterator[Rig]:
    """A proxy and its fake workers; checked to be clean at the end."""

    @asynccontextmanager
    async def rig() -> AsyncIterator[Rig]:
        async with connect(broker_url) as redis, serving(broker_url, redis, model, **fields) as ready:
            yield ready

    with on_a_thread(rig) as ready:
        yield ready
