"""No value of any field is more than the proxy can take: it is answered, or refused with the client's error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from common.messages import encode
from common.sampling_params import MAX_GRAMMAR_BYTES
from proxy.api.openai_types import ChatRequest, CompletionRequest
from proxy.api.sampling_fields import ACCEPTED_OFF, IGNORED
from proxy.api.transcriptions import TranscriptionForm
from tests.proxy.sample_media import speech

pytestmark = pytest.mark.slow

WEIRD = (
    True, 0, -1, 1.5, 2**31, 2**63, 2**70, 1e308, -0.0, "", "x", "\ud83d", "\x00", [], [[]], [None], [""], [0],
    {}, {"": None}, {"a": 1}, {"1": 1e308}, {"type": "text"}, {"type": "json_schema", "json_schema": {}},
)  # fmt: skip
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "[1e999]", '{"1": NaN}', "[" * 500 + "]" * 500)
MESSAGE = {"role": "user", "content": "hi"}
TEXT = "x" * (MAX_GRAMMAR_BYTES + 32 * 2**10)
LARGE = (TEXT, [TEXT], ["x" * 1000] * 300, {TEXT: 1}, {"a": TEXT})
LARGE_SHAPES = {
    "response_format": (
        {"type": "json_schema", "json_schema": {"schema": {"title": TEXT}}},
        {"type": "json_schema", "json_schema": {"name": TEXT, "schema": True}},
    ),
    "structured_outputs": (
        {"json": {"title": TEXT}}, {"json": TEXT}, {"regex": TEXT}, {"choice": [TEXT]}, {"grammar": TEXT},
    ),
    "messages": [[{**MESSAGE, name: TEXT}] for name in ("content", "name", "tool_calls")],
    "stream_options": ({"include_usage": True, "x": TEXT},),
}  # fmt: skip
LARGEST_MESSAGE_BYTES = len(TEXT) - 16 * 2**10
ENDPOINTS = [
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE]}),
    ("/v1/completions", CompletionRequest, {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "model", "needed"), ENDPOINTS)
async def test_json_fields(rig, path, model, needed) -> None:
    bodies = []
    for name in model.model_fields:
        bodies += [json.dumps({"max_tokens": 3, **needed, name: value}) for value in WEIRD]
        rest = {key: value for key, value in {"max_tokens": 3, **needed}.items() if key != name}
        bodies += [json.dumps({**rest, name: "RAW"}).replace('"RAW"', raw) for raw in RAW]
    places = asyncio.Semaphore(8)

    async def status(body: str) -> int:
        async with places:
            return (await rig.http.post(path, content=body.encode())).status_code

    statuses = await asyncio.gather(*map(status, bodies))
    wrong = [(code, body[:200]) for code, body in zip(statuses, bodies, strict=True) if code not in (200, 400, 404)]
    assert wrong == []
    assert statuses.count(200) > 50


@pytest.mark.parametrize(("path", "model", "needed"), ENDPOINTS)
async def test_no_field_makes_a_large_message_to_a_worker(rig, path, model, needed) -> None:
    """Above a limit a message would cost the connection, and everybody their requests on it."""
    values = [(name, value) for name in model.model_fields for value in LARGE]
    values += [(name, value) for name, shapes in LARGE_SHAPES.items() for value in shapes]
    values += [(name, TEXT) for name in (*IGNORED, *ACCEPTED_OFF)]
    statuses = []
    for name, value in values:
        response = await rig.http.post(path, json={"max_tokens": 3, **needed, name: value})
        statuses.append(response.status_code)
        assert response.status_code in (200, 400, 404), (name, response.text[:200])
    sent = [message for worker in rig.cluster.workers for message in worker.received]
    assert len(sent) >= statuses.count(200) > 5
    assert max(len(encode(message)) for message in sent) < LARGEST_MESSAGE_BYTES


async def test_form_fields(speech_rig) -> None:
    clip = speech(0.2)
    for name in TranscriptionForm.model_fields:
        for value in ("", "x", "-1", "1e999", "nan", "9" * 40, "\x00", "true", "[]", "ü"):
            form = {name: value}
            response = await speech_rig.http.post("/v1/audio/transcriptions", data=form, files={"file": ("x", clip)})
            assert response.status_code in (200, 400, 404), (form, response.text)


BAD = [{}] * 10_000
"""As many errors, if each were told: seconds of the loop where there are a million."""


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": BAD},
        {"messages": [{"role": "user", "content": BAD}]},
        {"stop": BAD},
        {"allowed_token_ids": BAD},
        {"stop_token_ids": BAD},
        {"bad_words": BAD},
        {"guided_choice": BAD},
        {"structured_outputs": {"choice": BAD}},
        {"response_format": {str(number): "x" for number in range(10_000)}},
        {"structured_outputs": {str(number): "x" for number in range(10_000)}},
        {"logit_bias": {str(number): "x" for number in range(10_000)}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_of_many_wrong_values_only_the_first_is_told(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate_json(json.dumps(body))
    assert raised.value.error_count() <= 2  # of a union, one for each form
