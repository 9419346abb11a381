"""The answers of POST /drain, the same of proxies and workers; as a program, the last thing asked of a container.

`python -m common.http.drain [SECONDS]` drains the process on this machine's port and returns when nothing is under way
there, after SECONDS at the latest. Meant for Kubernetes' preStop: needs no broker, and the settings of the process.
"""

from __future__ import annotations

import sys
import urllib.request
from typing import Final

from starlette.responses import JSONResponse

from common.config import Settings
from common.errors import invalid
from common.keys import bearer, cluster_token

MAX_WAIT_S: Final = 86_400.0
_CONNECT_S: Final = 10.0


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


def main(wait_s: str) -> str | None:
    """Drain the process on this machine's port; return None once nothing is under way, the reason after `wait_s`."""
    settings = Settings()
    token = cluster_token(settings)
    request = urllib.request.Request(
        f"http://127.0.0.1:{settings.port}/drain?wait={wait_s}",
        method="POST",
        headers={"Authorization": bearer(token)} if token else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=float(wait_s) + _CONNECT_S) as answer:
            return None if answer.status == 200 else str(answer.read().decode())
    except (OSError, ValueError) as error:
        return f"cannot drain: {error}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["600"]))
