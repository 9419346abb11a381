"""The description of the API: it names every route, and whatever it lets somebody send, the answer is no 5xx.

Everything goes to whole clusters with their engines: prompts to a model that sees, forms to one that hears.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.routing import Route

from common.config import Settings
from common.keys import bearer
from launch.cluster.local_cluster import LocalCluster
from proxy.api.openapi import document
from proxy.app import make_app
from proxy.routes import make_router
from tests.proxy.sample_media import speech
from tests.security.conftest import API_KEY
from tests.security.fuzz import EXAMPLES, examples, fuzz
from tests.security.knowing import knowing
from tests.tiny_models import make_whisper

FORM_FIELDS = sorted(document()["components"]["schemas"]["TranscriptionForm"]["properties"])
TEXTS = st.sampled_from(
    ["", "0", "-1", "1e999", "nan", "true", "json", "srt", "verbose_json", "en", "9" * 400, "\0", "é", "😀"]
) | st.text(max_size=40)
FORMS = st.dictionaries(st.sampled_from(FORM_FIELDS) | st.text(max_size=20), TEXTS, max_size=6)
FORM_CLIENT = httpx.Client(timeout=60, trust_env=False, verify=False)
GETS = [path for path, methods in document()["paths"].items() if "get" in methods]
MODES = pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
HEADERS = {"Authorization": bearer(API_KEY)}

pytestmark = pytest.mark.timeout(0 if EXAMPLES else 180)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One process beside the proxy. The model is random, and would never end by itself: it has room for few tokens."""
    folder = make_whisper(tmp_path_factory.mktemp("models") / "tiny-whisper", max_target_positions=24)
    with LocalCluster(Settings(model=str(folder), port=0), "1epd") as cluster:
        yield cluster


@pytest.mark.cluster
@pytest.mark.parametrize("path", GETS)
def test_no_question_is_answered_with_a_5xx(cluster: LocalCluster, path: str) -> None:
    assert fuzz(cluster.base_url, path, "GET", GenerationMode.POSITIVE, headers=HEADERS)


@pytest.mark.cluster
@MODES
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_prompt_is_answered_with_a_5xx(cluster: LocalCluster, path: str, mode: GenerationMode) -> None:
    statuses = fuzz(cluster.base_url, path, "POST", mode, knowing, HEADERS)
    assert statuses[400]
    assert mode is GenerationMode.NEGATIVE or statuses[200]  # the engines have seen some, too


@pytest.mark.cluster
@MODES
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_no_form_is_answered_with_a_5xx(whisper: LocalCluster, path: str, mode: GenerationMode) -> None:
    statuses = fuzz(whisper.base_url, path, "POST", mode, with_recording)
    assert mode is GenerationMode.NEGATIVE or statuses[200]  # the engine has heard some, too


@pytest.mark.cluster
@examples(100)
@given(fields=FORMS, clip=st.booleans())
def test_no_text_in_a_form_is_answered_with_a_5xx(whisper: LocalCluster, fields: dict[str, str], clip: bool) -> None:
    """Fields of a form are text whatever they should be: numbers, flags, names and lists among them."""
    file = ("x.wav", speech(0.2) if clip else fields.get("file", "").encode())
    response = FORM_CLIENT.post(f"{whisper.base_url}/v1/audio/transcriptions", data=fields, files={"file": file})
    assert response.status_code < 500, response.text


async def test_every_route_is_described_and_no_other(serve: Any) -> None:
    async with serve() as rig:
        served = (await rig.http.get("/openapi.json")).json()
        page = (await rig.http.get("/docs")).text
        http = [route for route in make_router(rig.service).routes if isinstance(route, APIRoute)]
        routes = {route.path for route in http if route.include_in_schema}  # not the page's
        own = {route.path for route in make_app(rig.service, 0).routes if isinstance(route, Route)}
    assert own == {"/openapi.json", "/docs"}
    assert "/openapi.json" in page
    assert served == json.loads(json.dumps(document()))
    assert set(served["paths"]) == {path.replace("{model:path}", "{model}") for path in routes} | {"/openapi.json"}


def with_recording(body: Any, rng: random.Random) -> Any:
    """A form with a real recording, and few other fields."""
    if not isinstance(body, dict):
        return body
    names = [name for name in body if name not in ("file", "model")]
    kept = rng.sample(names, min(len(names), rng.randint(0, 3)))
    return {**{name: body[name] for name in kept}, "file": speech(0.2)}
