"""OpenAPI document of the proxy, built from the types that the endpoints parse.

FastAPI serves the document under /openapi.json and /docs, but cannot derive it: endpoints admit a request before they
read the body, and declare none. /docs loads Swagger UI from a CDN, and stays empty in a browser without internet.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from common.http.drain import MAX_WAIT_S
from proxy.api.openai_types import ChatRequest, CompletionRequest
from proxy.api.responses.request import ResponsesRequest
from proxy.api.sampling_fields import ACCEPTED_OFF, IGNORED, GenerationRequest
from proxy.api.tokens import DetokenizeRequest, TokenizeRequest
from proxy.api.transcriptions import TranscriptionForm

_REF: Final = "#/components/schemas/{model}"
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_STATUS: Final = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
_ANY: Final = {"type": "object"}
_BODIES: Final[dict[str, type[BaseModel]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/audio/transcriptions": TranscriptionForm,
    "/v1/audio/translations": TranscriptionForm,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_LIMIT: Final = {
    "name": "limit",
    "in": "query",
    "description": "How many requests at most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50},
}


@functools.cache
def document() -> dict[str, Any]:
    """Return the document in OpenAPI 3.1, to be assigned to `FastAPI.openapi`."""
    models = dict.fromkeys(_BODIES.values())
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    definitions = schemas["$defs"]
    for model in (ChatRequest, CompletionRequest):
        _close(definitions[model.__name__], model)
    _add_file(definitions[TranscriptionForm.__name__])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": "1", "description": "OpenAI's API, for models that see and hear."},
        "paths": _paths(),
        "security": [{"key": []}, {}],
        "components": {
            "schemas": {**definitions, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    return {
        **{path: _post(model) for path, model in _BODIES.items()},
        "/v1/responses/{response_id}": _kept_response(),
        "/v1/models": _get("The served model.", _ANY),
        "/v1/models/{model}": _get("One model.", _ANY, model="Name of the served model."),
        "/v1/cluster": _get("The instances by role: state, load, queues, caches.", _ANY),
        "/v1/requests": _get("The last requests, the newest first.", _ANY, query=_LIMIT),
        "/v1/requests/{request_id}/timeline": _get(
            "Which stage ran where, from when to when.", _ANY, request_id="The `x-request-id` of an answer."
        ),
        "/health": _get("Is the process alive?", _STATUS, unavailable=True),
        "/ping": _get("Is the process alive? Another name, which SageMaker asks.", _STATUS, unavailable=True),
        "/version": _get("The version of Triptych.", _ANY),
        "/ready": _get("Can requests be served?", _STATUS, unavailable=True),
        "/drain": _drain(),
        "/metrics": _get("Numbers for Prometheus.", None),
        "/metrics/cluster": _get("The numbers of all instances, for Prometheus.", None),
        "/metrics/targets": _get("Where the instances are, for Prometheus.", {"type": "array", "items": _ANY}),
        "/openapi.json": _get("This description.", _ANY),
    }


def _post(model: type[BaseModel]) -> dict[str, Any]:
    media_type, schema = "application/json", {"$ref": _REF.format(model=model.__name__)}
    answers: dict[str, Any] = {"application/json": {"schema": _ANY}, "text/event-stream": {}}
    if model is TranscriptionForm:
        media_type, answers["text/plain"] = "multipart/form-data", {}
    return {
        "post": {
            "summary": (model.__doc__ or "").partition("\n")[0],
            "requestBody": {"required": True, "content": {media_type: {"schema": schema}}},
            "responses": _responses("The answer, whole or as server-sent events.", answers),
        }
    }


def _get(
    summary: str,
    schema: dict[str, Any] | None,
    *,
    unavailable: bool = False,
    query: dict[str, Any] | None = None,
    **in_path: str,
) -> dict[str, Any]:
    """Describe a GET; `in_path` describes the parameters in its path, `query` is another one."""
    content: dict[str, Any] = {"text/plain": {}} if schema is None else {"application/json": {"schema": schema}}
    responses = _responses(summary, content)
    if unavailable:
        responses["503"] = {"description": "No, and why.", "content": content}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": description, "schema": {"type": "string"}}
        for name, description in in_path.items()
    ]
    parameters += [] if query is None else [query]
    return {"get": {"summary": summary, "parameters": parameters, "responses": responses}}


def _drain() -> dict[str, Any]:
    """Describe the drain: an operator's, by the cluster's token, or from this machine without a cluster key."""
    seconds = {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S, "default": 0}
    wait = {"name": "wait", "in": "query", "description": "Seconds to wait for the end of requests.", "schema": seconds}
    content = {"application/json": {"schema": _STATUS}}
    responses = _responses("Nothing is under way.", content)
    responses["202"] = {"description": "Some requests are under way.", "content": content}
    return {"post": {"summary": "Stop being ready.", "parameters": [wait], "responses": responses}}


def _kept_response() -> dict[str, Any]:
    described = _get("A kept response.", _ANY, response_id="The id of a response.")
    return {**described, "delete": {**described["get"], "summary": "Forget a kept response."}}


def _responses(description: str, content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {
        "200": {"description": description, "content": content},
        "default": {"description": "An error, in OpenAI's shape.", "content": error},
    }


def _close(schema: dict[str, Any], model: type[GenerationRequest]) -> None:
    """Add the accepted fields beside the model's own, and forbid all others, as the model does."""
    properties = schema["properties"]
    for name in sorted(IGNORED - model.model_fields.keys()):
        properties[name] = {"description": "Accepted; changes nothing about the answer."}
    for name in sorted(ACCEPTED_OFF.keys() - model.model_fields.keys()):
        properties[name] = {"enum": list(ACCEPTED_OFF[name]), "description": "Not supported; accepted when off."}
    schema["additionalProperties"] = False


def _add_file(schema: dict[str, Any]) -> None:
    """Add the file, and write lists with brackets, as forms do."""
    properties = schema["properties"]
    for name in [name for name, field in properties.items() if field.get("type") == "array"]:
        properties[f"{name}[]"] = properties.pop(name)
    properties["file"] = {"type": "string", "format": "binary", "description": "The recording."}
    schema["required"] = [*schema.get("required", []), "file"]
