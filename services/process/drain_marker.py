"""A file with the next role of a worker, left to its supervisor at any end of the worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, cast

from common.messages import Role
from common.telemetry import get_logger

VARIABLE: Final = "TRIPTYCH_DEPARTURE_NOTE"
"""Environment variable with the path of the file."""

log = get_logger()


class DrainMarker:
    """Exists while a worker drains or changes its role. The registry has the same fact while the broker is up."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a path no file is written: the worker has no supervisor."""
        self._path = path

    @classmethod
    def of_environment(cls) -> DrainMarker:
        path = os.environ.get(VARIABLE)
        return cls(None if not path else Path(path))

    def write(self, next_role: Role | None) -> None:
        """Note the role to come back with; None to leave for good."""
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
        """The role to come back with; None to leave for good, and without a file."""
        if self._path is None or not self._path.exists():
            return None
        return cast(Role | None, self._path.read_text() or None)
