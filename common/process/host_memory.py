"""Memory of this machine left for a process: the kernel's figure, within the limits of containers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes available to this process before any page is swapped out or any process killed.

    The least of MemAvailable and of what every control group around the process (v1 and v2) has left, where pages of
    files that nobody uses count as free. Where the kernel tells neither: all of the machine's memory.
    """
    found = [*(1024 * kib for kib in _field(proc / "meminfo", "MemAvailable:")), *_left_in_groups(proc, cgroups)]
    if found:
        return max(0, min(found))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_along(cgroups, path, *_V2)
        elif "memory" in controllers.split(","):
            yield from _left_along(cgroups / "memory", path, *_V1)


def _left_along(root: Path, path: str, limits: tuple[str, ...], usage: str, reclaimable: str) -> Iterator[int]:
    """Yield the memory left in a group and in all groups around the group. In a container the path may be the host's:
    then the root counts."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        for name in limits:
            with contextlib.suppress(OSError, ValueError):  # no such group here, or no limit ("max")
                limit = int((folder / name).read_text())
                yield limit - int((folder / usage).read_text()) + sum(_field(folder / "memory.stat", reclaimable))


def _field(path: Path, name: str) -> Iterator[int]:
    """Yield the number beside a name in a file of the kernel; nothing without the file or the name."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                yield int(line.split()[1])
