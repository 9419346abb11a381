"""Files of the page, and the headers that keep it to itself: no other origin is loaded, asked or framed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi.responses import Response

FOLDER: Final = Path(__file__).parent / "files"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_POLICY: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data: blob:",
    "media-src blob:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
HEADERS: Final = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def read_files() -> dict[str, Response]:
    """Return the answer to each file of the page, by name."""
    return {
        path.name: Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=HEADERS)
        for path in FOLDER.iterdir()
        if path.suffix in _TYPES
    }
