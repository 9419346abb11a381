"""Call native code with input-dependent recursion: on an ordinary thread a deep input would end the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from common.errors import TriptychError

STACK_BYTES: Final = 256 * 2**20
"""32 times that of an ordinary thread. Only what is touched of it takes memory, and all of it is given back."""

T = TypeVar("T")
_sizing = threading.Lock()


def call_deep(function: Callable[[], T]) -> T:
    """Call `function` on a separate thread with a stack of STACK_BYTES; return its result or raise its error.

    Raises TriptychError("overloaded") where the system has no such thread to give.
    """
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="deep", daemon=True)
    with _sizing:  # the size is that of all threads which begin meanwhile
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise TriptychError("overloaded", f"no thread with a stack of {STACK_BYTES >> 20} MiB: {error}") from error
        finally:
            threading.stack_size(before)
    thread.join()
    return outcome.result()
