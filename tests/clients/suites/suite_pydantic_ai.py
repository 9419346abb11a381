"""pydantic-ai: text with a picture, its default output by a tool, native output, over chats and over responses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SIGN = (Path(os.environ["CHECKOUT"]) / "docs/images/sign.png").read_bytes()
ASKED = [BinaryContent(SIGN, media_type="image/png"), "What colour is the sign?"]
SETTINGS: Any = {"temperature": 0, "max_tokens": 80}


class Sign(BaseModel):
    colour: Literal["red", "green", "blue", "yellow", "orange", "purple", "white", "black"]


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chats", "responses"])
def model(request: pytest.FixtureRequest) -> Any:
    provider = OpenAIProvider(base_url=os.environ["SIGNS_URL"] + "/v1", api_key="none")
    return request.param("signpost", provider=provider)


def test_pictures(model: Any) -> None:
    assert Agent(model, model_settings=SETTINGS).run_sync(ASKED).output == "purple"


async def test_streams(model: Any) -> None:
    async with Agent(model, model_settings=SETTINGS).run_stream(ASKED) as stream:
        assert await stream.get_output() == "purple"


def test_tool_output(model: Any) -> None:
    assert isinstance(Agent(model, output_type=Sign, model_settings=SETTINGS).run_sync(ASKED).output, Sign)


def test_native_output(model: Any) -> None:
    agent = Agent(model, output_type=NativeOutput(Sign), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(ASKED).output, Sign)
