"""Folders with the logs of supervised processes: a folder per supervisor, and only the newest of the abandoned folders.

A supervisor removes its own folder after a good end only. The next supervisor removes all but the newest few.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "triptych-logs-"
KEPT: Final = 5
"""How many folders that nobody uses any more are left alone."""


class LogFolder:
    """A new folder in the folder for temporary files, locked as long as this process lives or until `close`."""

    def __init__(self) -> None:
        _remove_old(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        # Children do not inherit the descriptor. Another supervisor's look may hold the lock for a moment (`_is_used`).
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self, *, keep: bool) -> None:
        """Release the folder, and remove the files unless `keep` is set."""
        os.close(self._lock)
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_old(folder: Path) -> None:
    """Remove the folders of this user's dead supervisors, except the newest."""
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another supervisor has just removed it
            status = path.stat()
            if status.st_uid == os.getuid() and not _is_used(path):
                found.append((status.st_mtime, path))
    for _, path in sorted(found, reverse=True)[KEPT:]:  # one made a moment ago is not locked yet, but among the newest
        shutil.rmtree(path, ignore_errors=True)


def _is_used(path: Path) -> bool:
    """Return whether a living supervisor holds the lock. Raises OSError for a missing folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
