"""Proxies that serve from a thread of their own, for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.redis_client import connect
from tests.proxy.conftest import Rig, serving


@contextmanager
def threaded_rig(broker_url: str, model: Path | str, **fields: Any) -> Iterator[Rig]:
    """A proxy and its fake workers, in a loop on another thread; checked to be clean at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rig", daemon=True)
    thread.start()

    async def enter() -> tuple[Any, Any, Rig]:
        redis = connect(broker_url)
        manager = serving(broker_url, redis, model, **fields)
        return manager, redis, await manager.__aenter__()

    async def leave() -> None:
        try:
            await manager.__aexit__(None, None, None)
        finally:
            await redis.aclose()

    manager, redis, rig = asyncio.run_coroutine_threadsafe(enter(), loop).result(30)
    try:
        yield rig
    finally:
        asyncio.run_coroutine_threadsafe(leave(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
