"""`triptych logs`: lines of a running local cluster's processes, in order of time, and those to come."""

from __future__ import annotations

import heapq
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import TriptychError, invalid
from launch.cluster.local_registry import LocalEntry

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_HEAD: Final = re.compile(r"(\d{4}-\d\d-\d\dT\S+) \[(\w+) *\]")
_POLL_S: Final = 0.25


@dataclass
class LogReader:
    """The log of one instance, read as the file grows. Lines without time and level belong to the line before."""

    path: Path
    moment: str = ""
    level: str = "info"
    offset: int = 0
    _rest: bytes = b""

    @property
    def instance(self) -> str:
        return self.path.stem

    def read(self) -> Iterator[tuple[str, str, str]]:
        """Yield moment, level and text of each whole line written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self.moment, self.level = _head(text) or (self.moment, self.level)
            yield self.moment, self.level, text


def show_logs(entry: LocalEntry, instance: str | None, level: str, follow: Callable[[], bool] | None) -> int:
    """Print the log lines of a cluster, of one instance or of all, from a level up; return 0.

    `follow` says whether to wait for more lines. Raises TriptychError where there are no logs, or no such instance.
    """
    folder = Path(entry.logs)
    if not entry.logs or not folder.is_dir():
        raise TriptychError("unavailable", f"the cluster at {entry.base_url} has no folder of logs ({entry.logs!r})")
    readers = {path: LogReader(path) for path in sorted(folder.glob("*.log"))}
    if instance is not None:
        chosen = [reader for reader in readers.values() if reader.instance == instance]
        if not chosen:
            known = ", ".join(reader.instance for reader in readers.values())
            raise invalid(f"there is no log of {instance!r} in {folder}: it has {known}", "instance")
        readers = {reader.path: reader for reader in chosen}
    width = 0 if instance else max((len(reader.instance) for reader in readers.values()), default=0)
    try:
        _print(readers, width, level)
        while follow is not None and follow() and folder.is_dir():
            time.sleep(_POLL_S)
            if instance is None:
                readers |= {path: LogReader(path) for path in folder.glob("*.log") if path not in readers}
            _print(readers, width, level)
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KeyboardInterrupt, FileNotFoundError):  # the cluster may have ended well, and have taken its logs along
        pass
    return 0


def _print(readers: dict[Path, LogReader], width: int, level: str) -> None:
    """Print new lines of all readers by time, each after the instance's name padded to `width`."""
    least = LEVELS.index(level)

    def tagged(reader: LogReader) -> Iterator[tuple[str, str, str, str]]:
        return ((moment, reader.instance, of_line, text) for moment, of_line, text in reader.read())

    for _, name, of_line, text in heapq.merge(*map(tagged, readers.values()), key=lambda line: line[0]):
        if of_line not in LEVELS or LEVELS.index(of_line) >= least:
            sys.stdout.write(f"{name:{width}} {text}\n" if width else f"{text}\n")
    sys.stdout.flush()


def _head(text: str) -> tuple[str, str] | None:
    """Return moment and level of a line that begins an entry, as text or as JSON."""
    if (found := _HEAD.match(text)) is not None:
        return found[1], found[2]
    if text.startswith("{"):
        try:
            entry = json.loads(text)
            return str(entry["timestamp"]), str(entry["level"])
        except (ValueError, KeyError):
            return None
    return None
