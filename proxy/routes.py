"""The HTTP routes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from common.errors import TriptychError
from common.http.auth import ApiKeys
from common.http.drain import drain_answer, wait_of
from proxy.api.chat import chat_completions
from proxy.api.completions import completions
from proxy.api.realtime import realtime
from proxy.api.responses.endpoint import responses
from proxy.api.tokens import detokenize, tokenize
from proxy.api.transcriptions import transcriptions
from proxy.observe.scrape import ClusterMetrics, targets
from proxy.page import overview
from proxy.page.routes import add_page
from proxy.server.errors import RETRY_AFTER_S
from proxy.server.request_context import Endpoint
from proxy.service import Problem, Service


def make_router(service: Service) -> APIRouter:
    """All routes of the proxy over one service."""
    router = APIRouter()
    limit = service.settings.max_body_bytes
    keys = ApiKeys(service.settings)

    def has_key(request: Request) -> bool:
        """Return whether the caller of an open path may see details of the cluster: a key, or no keys at all."""
        given = request.headers.getlist("authorization")
        return not keys or keys.accepts(given[0] if len(given) == 1 else None)

    def generates(path: str, prefix: str, endpoint: Endpoint) -> None:
        async def answer(request: Request) -> Response:
            return await service.admission.answer(request, prefix, limit, endpoint)

        router.add_api_route(path, answer, methods=["POST"])

    generates("/v1/chat/completions", "chatcmpl-", partial(chat_completions, service))
    generates("/v1/responses", "resp_", partial(responses, service))
    generates("/v1/completions", "cmpl-", partial(completions, service))
    generates("/v1/audio/transcriptions", "trsc-", partial(transcriptions, service))
    generates("/v1/audio/translations", "trsl-", partial(transcriptions, service, task="translate"))

    generates("/tokenize", "tok-", partial(tokenize, service))
    generates("/detokenize", "detok-", partial(detokenize, service))
    add_page(router, service)

    @router.get("/v1/responses/{response_id}")
    async def _response(response_id: str) -> dict[str, Any]:
        return service.responses.get(response_id)

    @router.delete("/v1/responses/{response_id}")
    async def _forget_response(response_id: str) -> dict[str, Any]:
        service.responses.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/v1/models")
    async def _models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in (*service.model_names, *service.adapters)]}

    @router.get("/v1/models/{model:path}")
    async def _one_model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return _model(service, model)

    @router.get("/v1/requests/{request_id}/timeline")
    async def _timeline(request_id: str) -> dict[str, Any]:
        timeline = service.timelines.get(request_id)
        if timeline is None:
            raise TriptychError("not_found", f"no timeline of {request_id!r}: unknown or too old", "request_id")
        return timeline

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def _health(request: Request) -> Response:
        return _verdict(service.failure(), with_details=has_key(request))

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def _ready(request: Request) -> Response:
        return _verdict(service.not_ready(), with_details=has_key(request))

    @router.post("/drain")
    async def _drain(request: Request) -> Response:
        wait_s = wait_of(request.query_params.get("wait"))
        return drain_answer(await service.admission.drain(wait_s), waited=wait_s > 0)

    _add_others(router, service)
    return router


def _add_others(router: APIRouter, service: Service) -> None:
    """Add the websocket, and routes of programs that look after servers: vLLM's, SageMaker's and Prometheus'."""
    whole = ClusterMetrics(service)

    @router.websocket("/v1/realtime")
    async def _realtime(websocket: WebSocket) -> None:
        await realtime(service, websocket)

    @router.api_route("/ping", methods=["GET", "HEAD", "POST"])
    async def _ping() -> Response:
        return _verdict(service.failure(), with_details=False)

    @router.get("/version")
    async def _version() -> dict[str, Any]:
        return {"version": overview.own_version()}

    @router.get("/metrics")
    async def _metrics() -> Response:
        service.update_gauges()
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/metrics/cluster")
    async def _cluster_metrics() -> Response:
        return Response(await whole.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/metrics/targets")
    async def _targets() -> Response:
        return JSONResponse(targets(service))


def _verdict(problem: Problem, *, with_details: bool) -> Response:
    if not problem:
        return JSONResponse({"status": "ok"})
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    reason = "; ".join(problem if with_details else problem[:1])
    return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503, headers=headers)


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "triptych",
        "max_model_len": service.max_model_len,
        **({} if adapter is None else {"parent": name.removesuffix(f":{adapter}")}),
    }
