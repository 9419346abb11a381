"""The description of the API: it names every route, and whatever it lets somebody send, the answer is no 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from proxy.openapi import document, make_openapi_router
from proxy.routes import make_router
from tests.proxy.conftest import Rig
from tests.proxy.media import speech
from tests.security.rigs import threaded_rig

EXAMPLES = 25
"""Of requests as described, and of requests that are not. Making them is what takes the time: 0.2 s for each chat."""
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
FORM_FUZZ = settings(FUZZ, max_examples=100)
FORM_FIELDS = sorted(document()["components"]["schemas"]["TranscriptionForm"]["properties"])
TEXTS = st.sampled_from(
    ["", "0", "-1", "1e999", "nan", "true", "json", "srt", "verbose_json", "en", "9" * 400, "\0", "é", "😀"]
) | st.text(max_size=40)
FORMS = st.dictionaries(st.sampled_from(FORM_FIELDS) | st.text(max_size=20), TEXTS, max_size=6)
FORM_CLIENT = httpx.Client(timeout=60, trust_env=False, verify=False)
SCHEMA = schemathesis.openapi.from_dict(document())
GETS = [path for path, methods in document()["paths"].items() if "get" in methods]
MODES = pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)


@pytest.fixture(scope="module")
def pictures(broker_url: str) -> Iterator[Rig]:
    with threaded_rig(broker_url, "signpost") as rig:
        yield rig


@pytest.fixture(scope="module")
def whisper(broker_url: str, whisper_model: Any) -> Iterator[Rig]:
    with threaded_rig(broker_url, whisper_model.folder) as rig:
        yield rig


@pytest.mark.parametrize("path", GETS)
def test_no_question_is_answered_with_a_5xx(pictures: Rig, path: str) -> None:
    fuzz(pictures, path, "GET", GenerationMode.POSITIVE)


@MODES
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_prompt_is_answered_with_a_5xx(pictures: Rig, path: str, mode: GenerationMode) -> None:
    fuzz(pictures, path, "POST", mode)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_no_form_is_answered_with_a_5xx(whisper: Rig, path: str) -> None:
    fuzz(whisper, path, "POST", GenerationMode.POSITIVE, speech(0.2))


@FORM_FUZZ
@given(
    fields=st.dictionaries(st.sampled_from(FORM_FIELDS) | st.text(max_size=20), TEXTS, max_size=6), clip=st.booleans()
)
def test_no_text_in_a_form_is_answered_with_a_5xx(whisper: Rig, fields: dict[str, str], clip: bool) -> None:
    """Fields of a form are text whatever they should be: numbers, flags, names and lists among them."""
    file = ("x.wav", speech(0.2) if clip else fields.get("file", "").encode())
    response = FORM_CLIENT.post(f"{whisper.base_url}/v1/audio/transcriptions", data=fields, files={"file": file})
    assert response.status_code < 500, response.text


async def test_every_route_is_described_and_no_other(serve: Any) -> None:
    async with serve() as rig:
        served = (await rig.http.get("/openapi.json")).json()
        routes = {route.path for route in (*make_router(rig.service).routes, *make_openapi_router().routes)}
    assert served == json.loads(json.dumps(document()))
    assert set(served["paths"]) == {path.replace("{model:path}", "{model}") for path in routes}


def fuzz(rig: Rig, path: str, method: str, mode: GenerationMode, clip: bytes | None = None) -> None:
    """Send different requests; with `clip`, every other form has a real recording in it."""
    statuses: list[int] = []

    @FUZZ
    @given(case=SCHEMA[path][method].as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if clip is not None and len(statuses) % 2 and isinstance(case.body, dict):
            case.body["file"] = clip
        response = case.call(base_url=rig.base_url, timeout=60)
        statuses.append(response.status_code)
        assert response.status_code < 500, (case.body, response.text)

    send()
    assert statuses
