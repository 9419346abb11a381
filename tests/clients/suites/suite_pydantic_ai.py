"""pydantic-ai: text with a picture, its default output by a tool, native output, over chats and over responses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from signs import PICTURE, QUESTION, URL, Sign

ASKED = [BinaryContent(PICTURE, media_type="image/png"), QUESTION]
SETTINGS: Any = {"temperature": 0, "max_tokens": 80}


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chats", "responses"])
def model(request: pytest.FixtureRequest) -> Any:
    provider = OpenAIProvider(base_url=URL, api_key="none")
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
