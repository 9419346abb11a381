"""Wait for something another task or process does, without sleeping blindly."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 5.0) -> None:
    """Return once `condition()`, a function or a coroutine function, says True; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer is True or (inspect.isawaitable(answer) and await answer):
            return
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)
