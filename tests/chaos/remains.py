"""What is left behind by processes that have ended, and of them in those that live: processes and shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from broker.transports.shm.sender import ARENA_BYTES
from launch.cluster.local_cluster import LocalCluster
from tools.soak.memory import descendants, processes, resident_bytes, shared_files


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
        self._usual: dict[str, int] = {}

    def rest(self) -> None:
        """Remember what there is where nothing is under way: so many processes each worker has."""
        self.look()
        self._usual = {head.name: len(self._children(head)) for head in self._families if head.lives}

    def look(self) -> None:
        """Remember what there is now."""
        for name, pid in _heads(self._cluster):
            head = _process(name, pid)
            if head is not None:
                family = self._families.setdefault(head, set())
                family |= {head, *filter(None, (_process(f"of {name}", child) for child in descendants(pid)))}
        self._shared |= shared_files(self._living())

    def found(self) -> list[str]:
        """Processes whose worker, proxy or broker has ended, and those that one which lives has more of than usual;
        shared memory that no process of the cluster uses, and such of two workers that one alone still has.
        """
        dead = [family for head, family in self._families.items() if not head.lives]
        self.look()
        found = [f"{one.name}: process {one.pid}" for family in dead for one in family if one.lives]
        found += [f"{head.name}: more processes than {usual}" for head, usual in self._grown()]
        used = shared_files(self._living())
        found += [str(path) for path in sorted(self._shared - used) if path.exists()]
        users = Counter(arena for pid in self._living() for arena in _arenas(pid))
        return found + [f"arena {arena} of one process alone" for arena, count in users.items() if count == 1]

    def _grown(self) -> Iterator[tuple[Process, int]]:
        """Those that live and have more processes than usual, and how many they had."""
        for head in self._families:
            usual = self._usual.get(head.name)
            if head.lives and usual is not None and len(self._children(head)) > usual:
                yield head, usual

    def _children(self, head: Process) -> list[int]:
        return [one.pid for one in self._families[head] if one.lives and one != head]

    def _living(self) -> Iterator[int]:
        return (one.pid for family in self._families.values() for one in family if one.lives)


def _heads(cluster: LocalCluster) -> Iterator[tuple[str, int]]:
    return ((name, pid) for name, pid in processes(cluster) if " child " not in name)


def _arenas(pid: int) -> set[str]:
    """The memory that a process shares with other workers, one each, by its inode."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has just ended
        return set()
    fields = [line.split() for line in lines if "memfd:triptych" in line]
    return {inode for extent, _, _, _, inode, *_ in fields if _size(extent) == ARENA_BYTES}


def _size(extent: str) -> int:
    start, end = extent.split("-")
    return int(end, 16) - int(start, 16)


def _process(name: str, pid: int) -> Process | None:
    began = _began(pid)
    return None if began is None else Process(name, pid, began)


def _began(pid: int) -> int | None:
    """When a process was started, as in /proc/PID/stat; None where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None
