"""The phase of a starting process, told to its supervisor in a small file; nothing happens without a supervisor."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "TRIPTYCH_START_PHASE"
"""Environment variable with the path of the file."""
STARTING: Final = "starting"


def tell_phase(phase: str, percent: int | None = None) -> None:
    """Replace the phase, such as `reading weights` and `40`."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):  # a full disk must not end a start
            Path(path).write_text(phase if percent is None else f"{phase} {percent} %")


def read_phase(path: Path | None) -> str:
    """Return the phase in a file; `starting` before the first."""
    with contextlib.suppress(OSError):
        return (path.read_text() if path is not None else "") or STARTING
    return STARTING
