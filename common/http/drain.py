"""The answers of POST /drain, the same of proxies and workers."""

from __future__ import annotations

from typing import Final

from starlette.responses import JSONResponse

from common.errors import invalid

MAX_WAIT_S: Final = 86_400.0


def wait_of(given: str | None) -> float:
    """Return the seconds of the query's `wait`, 0 without. Raises TriptychError("invalid_request") for any other."""
    try:
        wait_s = float(given or 0)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise invalid(f"wait must be seconds from 0 to {MAX_WAIT_S:.0f}, not {(given or '')[:80]!r}", "wait")
    return wait_s


def drain_answer(left: int, *, waited: bool) -> JSONResponse:
    """Return 200 after a wait that left nothing under way, else 202."""
    done = waited and left == 0
    return JSONResponse({"status": "drained" if done else "draining", "outstanding": left}, 200 if done else 202)
