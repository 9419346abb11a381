"""The end of a child process together with the parent, whatever ends the parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

CLEAN_STOP_S = 3.0
"""How long a child may take for a clean stop once its parent is gone."""


def follow_parent(fd: int = 0, on_gone: Callable[[], None] | None = None) -> threading.Thread:
    """Stop this process when the pipe at `fd` ends; the living parent holds the pipe open.

    A pipe works after SIGKILL of the parent too, on every Unix, and whichever thread of the parent started us.
    """

    def watch() -> None:
        while os.read(fd, 4096):
            pass
        (on_gone or _stop_self)()

    thread = threading.Thread(target=watch, name="lifeline", daemon=True)
    thread.start()
    return thread


def _stop_self() -> None:
    """Ask for a clean stop; after too long a time end the process by force, helpers included."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(CLEAN_STOP_S)  # not a synchronisation: if the clean stop works, this thread ends with the process
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)
