"""Resident memory of every process of a cluster over time, and whether it is flat."""

from __future__ import annotations

import contextlib
import os
import statistics
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from launch.cluster.local_cluster import LocalCluster

FLAT: Final = 0.02
"""A rise over the window, as a share of the mean, up to which memory counts as flat."""
NOISE_BYTES: Final = 512 * 1024
"""What a process's memory may rise by anyway: for a server of 7 MiB, 2 % would be less than a connection's buffers."""
SHARED: Final = Path("/dev/shm")
WINDOW: Final = 2 / 3  # the judged last part of the run: caches fill before


@dataclass
class Life:
    """One process from its first sample to its last: seconds since the start of the run, and bytes, in small arrays."""

    name: str
    pid: int
    times_s: array[float] = field(default_factory=lambda: array("d"))
    sizes: array[int] = field(default_factory=lambda: array("q"))

    def window(self, start_s: float) -> Life:
        """What was sampled from `start_s` on."""
        kept = [(at, size) for at, size in zip(self.times_s, self.sizes, strict=True) if at >= start_s]
        return Life(self.name, self.pid, array("d", [at for at, _ in kept]), array("q", [size for _, size in kept]))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.sizes)

    @property
    def rise(self) -> float:
        """Bytes gained from the first sample to the last, by the line of least squares through all of them."""
        if len(self.times_s) < 2:
            return 0.0
        slope, _ = statistics.linear_regression(self.times_s, self.sizes)
        return slope * (self.times_s[-1] - self.times_s[0])

    @property
    def flat(self) -> bool:
        return self.rise <= max(FLAT * self.mean, NOISE_BYTES)


class MemoryLog:
    """Samples of all processes; a process that is started again begins another life."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], Life] = {}
        self.last_s = 0.0
        self.shared: set[Path] = set()
        """Shared memory that any of the processes has ever been seen to use."""

    def sample(self, running: Collection[tuple[str, int]], at_s: float) -> dict[str, int]:
        """Look at these processes, names and ids, now; bytes by name."""
        self.last_s = at_s
        found: dict[str, int] = {}
        self.shared |= shared_files(pid for _, pid in running if pid != os.getpid())
        for name, pid in running:
            size = resident_bytes(pid)
            if size is None:
                continue
            life = self._lives.setdefault((name, pid), Life(name, pid))
            life.times_s.append(at_s)
            life.sizes.append(size)
            found[name] = size
        return found

    def survivors(self) -> list[Life]:
        """The lives that lasted through the whole window, cut to it."""
        start_s = (1 - WINDOW) * self.last_s
        lives = (life for life in self._lives.values() if life.times_s[0] <= start_s)
        return [life.window(start_s) for life in lives if life.times_s[-1] == self.last_s]


def processes(cluster: LocalCluster) -> Iterable[tuple[str, int]]:
    """Names and ids of a cluster's processes: the broker, the proxy, workers and what they have started."""
    if (broker := cluster.supervisor.broker_pid) is not None:
        yield "broker", broker
    for instance in cluster.instances.values():
        if (pid := instance.pid) is not None:
            yield instance.id, pid
            for number, child in enumerate(sorted(children_of(pid))):
                yield f"{instance.id} child {number}", child


def resident_bytes(pid: int) -> int | None:
    """What a process has in memory now; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def shared_files(pids: Iterable[int]) -> set[Path]:
    """The files in /dev/shm that these processes have mapped: segments and semaphores."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found.update(SHARED / line.partition(f"{SHARED}/")[2] for line in lines if f"{SHARED}/" in line)
    return found


def children_of(pid: int) -> set[int]:
    """The processes that a process has started, whichever of its threads did."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # only this thread has
                found.update(int(child) for child in (task / "children").read_text().split())
    return found


def descendants(pid: int) -> set[int]:
    """All processes below a process."""
    children = children_of(pid)
    return children.union(*map(descendants, children))
