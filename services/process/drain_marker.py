"""What a worker has been told to do, left where its supervisor finds it when the worker has ended, however it has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, cast

from common.messages import Role
from common.telemetry import get_logger

VARIABLE: Final = "TRIPTYCH_DEPARTURE_NOTE"
"""Tells a worker the path of its note."""

log = get_logger()


class DrainMarker:
    """There from when a worker is told to leave, or to change its role, until it has. The registry says so as well, as
    long as there is a broker that keeps it.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Without a path nothing is noted: nobody looks after this worker."""
        self._path = path

    @classmethod
    def of_environment(cls) -> DrainMarker:
        path = os.environ.get(VARIABLE)
        return cls(None if not path else Path(path))

    def write(self, next_role: Role | None) -> None:
        """The worker is to come back as this, or to leave for good."""
        if self._path is None:
            return
        unfinished = self._path.with_suffix(".new")
        try:
            unfinished.write_text(next_role or "")
            unfinished.replace(self._path)
        except OSError as error:
            log.warning("no note can be left of this worker's departure", error=str(error))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def exists(self) -> bool:
        return self._path is not None and self._path.exists()

    @property
    def next_role(self) -> Role | None:
        """What the worker was to come back as; None where it was to leave, or where there is no note."""
        if self._path is None or not self._path.exists():
            return None
        return cast(Role | None, self._path.read_text() or None)
