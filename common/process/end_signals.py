"""Signals that ask a process to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_end_signal(call: Callable[[], object]) -> None:
    """Call `call` on the running loop at SIGTERM, Ctrl-C, or the end of the terminal: but not that under `nohup`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, call)
