"""The page about the API: its examples are answered, and it names every field that there is, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from proxy.api.openai_types import ChatRequest, CompletionRequest
from proxy.api.responses.request import ResponsesRequest
from proxy.api.sampling_fields import GenerationRequest
from proxy.api.transcriptions import TranscriptionForm
from proxy.routes import make_router
from tests.proxy.sample_media import speech

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text()
EXAMPLE = re.compile(r"```(json|form) POST (\S+)( encoder-decoder)?\n(.*?)```", re.DOTALL)
EXAMPLES = EXAMPLE.findall(PAGE)
SECTIONS = {"## Generating": GenerationRequest, "### Chat": ChatRequest, "### Completions": CompletionRequest}
SECTIONS |= {"## Speech": TranscriptionForm, "### Responses": ResponsesRequest}


def _documented(heading: str) -> set[str]:
    """The fields in the first table under a heading."""
    section = PAGE.partition(f"\n{heading}\n")[2]
    table = section.partition("|---|---|\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    return {name.removesuffix("[]") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_field_is_documented_and_no_other(heading: str) -> None:
    model: type[BaseModel] = SECTIONS[heading]
    fields = set(model.model_fields)
    if model in (ChatRequest, CompletionRequest):
        common = set(GenerationRequest.model_fields)
        fields -= common
    missing, unknown = fields - _documented(heading), _documented(heading) - fields
    table = f"the first table under {heading!r} of docs/reference/api.md"
    assert not missing, f"{table} lacks {sorted(missing)}"
    assert not unknown, f"{table} has unknown fields: {sorted(unknown)}"


@pytest.mark.parametrize(("kind", "path", "of", "text"), EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
async def test_examples_are_answered(serve, whisper_model, translation_model, kind, path, of, text) -> None:
    folder = whisper_model.folder if kind == "form" else translation_model.folder if of else "signpost"
    async with serve(folder) as rig:
        if kind == "json":
            response = await rig.http.post(path, json=json.loads(text))
        else:
            form = dict(line.split("=", 1) for line in text.split())
            response = await rig.http.post(path, data=form, files={"file": ("x.wav", speech(1))})
        assert response.status_code == 200, response.text


def test_there_are_examples_of_every_route_that_generates() -> None:
    assert {path for _, path, _, _ in EXAMPLES} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/audio/transcriptions",
    }


async def test_every_route_is_in_the_table(serve) -> None:
    async with serve() as rig:
        paths = {route.path for route in make_router(rig.service).routes}
    table = PAGE.partition("| route | what it does |")[2].partition("\n\n")[0]
    renamed = table.replace("{id}", "{request_id}").replace("{model}", "{model:path}")
    assert set(re.findall(r"(/[\w/{}:]+)", renamed)) == paths - {"/"}
