"""What processes that have ended leave behind: processes that they had started, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launch.cluster import LocalCluster
from launch.soak.memory import children_of, processes, resident_bytes, shared_files


class Process(NamedTuple):
    """One that has been seen. Ids come again: with `began`, in ticks since the machine started, they are one's own."""

    name: str
    pid: int
    began: int

    @property
    def lives(self) -> bool:
        """Whether it has not ended; one whose end nobody has collected yet has."""
        return _began(self.pid) == self.began and bool(resident_bytes(self.pid))


class Remains:
    """Remembers every process of a cluster and its workers, and every file of shared memory, that was ever seen."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._families: dict[Process, set[Process]] = {}
        self._shared: set[Path] = set()

    def look(self) -> None:
        """Remember what there is now."""
        for name, pid in _heads(self._cluster):
            head = _process(name, pid)
            if head is not None:
                family = self._families.setdefault(head, set())
                family |= {head, *filter(None, (_process(f"of {name}", child) for child in _descendants(pid)))}
        self._shared |= shared_files(self._living())

    def of_the_dead(self) -> list[str]:
        """Processes whose worker, proxy or broker has ended, and shared memory that no process of the cluster uses."""
        dead = [family for head, family in self._families.items() if not head.lives]
        found = [f"{one.name}: process {one.pid}" for family in dead for one in family if one.lives]
        self.look()
        used = shared_files(self._living())
        return found + [str(path) for path in sorted(self._shared - used) if path.exists()]

    def _living(self) -> Iterator[int]:
        return (one.pid for family in self._families.values() for one in family if one.lives)


def _heads(cluster: LocalCluster) -> Iterator[tuple[str, int]]:
    return ((name, pid) for name, pid in processes(cluster) if " child " not in name)


def _descendants(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from _descendants(child)


def _process(name: str, pid: int) -> Process | None:
    began = _began(pid)
    return None if began is None else Process(name, pid, began)


def _began(pid: int) -> int | None:
    """When a process was started, as in /proc/PID/stat; None where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None
