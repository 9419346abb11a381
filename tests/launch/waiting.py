"""Waiting for what other processes do, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

_pause = threading.Event()


def eventually(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Return the seconds until `condition()` was true; fail after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:g} s: {what}"
        _pause.wait(0.05)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
