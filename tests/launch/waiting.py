"""Waiting for what other processes do, with a deadline."""

from __future__ import annotations

import os
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


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting.extend(children)
    return found


def shared_memory_of(pids: set[int]) -> set[Path]:
    """The files in /dev/shm that these processes have mapped: segments and semaphores."""
    found: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found.update(Path("/dev/shm" + line.partition("/dev/shm")[2]) for line in lines if "/dev/shm/" in line)
    return found
