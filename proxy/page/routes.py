"""Routes of the page and of the JSON that the page reads."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from common.errors import TriptychError
from proxy.page import assets, overview
from proxy.service import Service


def add_page(router: APIRouter, service: Service) -> None:
    files = assets.read_files()

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
