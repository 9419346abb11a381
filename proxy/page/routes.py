"""Routes of the page and of the JSON that the page reads.

The page's headers keep it to itself: no other origin is loaded, asked or framed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from common.errors import TriptychError
from proxy.page import overview
from proxy.service import Service

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


def add_page(router: APIRouter, service: Service) -> None:
    files = {
        path.name: Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=HEADERS)
        for path in FOLDER.iterdir()
        if path.suffix in _TYPES
    }

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def _page() -> Response:
        return files["index.html"]

    @router.get("/page/{name}", include_in_schema=False)
    async def _file(name: str) -> Response:
        if name not in files:
            raise TriptychError("not_found", f"the page has no file {name[:100]!r}", "name")
        return files[name]

    @router.get("/v1/cluster")
    async def _cluster() -> dict[str, Any]:
        return overview.cluster(service)

    @router.get("/v1/requests")
    async def _requests(request: Request) -> dict[str, Any]:
        return overview.requests(service, request.query_params.get("limit"))
