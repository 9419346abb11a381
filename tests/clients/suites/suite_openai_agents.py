"""OpenAI's agents: text, streams, tools and typed output, over responses and over chats."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from signs import QUESTION, URL, Sign


@pytest.fixture(params=[True, False], ids=["responses", "chats"])
def config(request: pytest.FixtureRequest) -> RunConfig:
    client = AsyncOpenAI(base_url=URL, api_key="none")
    return RunConfig(model_provider=OpenAIProvider(openai_client=client, use_responses=request.param))


async def test_text_and_streams(config: RunConfig) -> None:
    settings = ModelSettings(temperature=0)
    agent = Agent(name="Reader", instructions="Be brief.", model="signpost", model_settings=settings)
    done = await Runner.run(agent, QUESTION, run_config=config)
    assert isinstance(done.final_output, str)
    streamed = Runner.run_streamed(agent, QUESTION, run_config=config)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds


async def test_tools_and_typed_output(config: RunConfig) -> None:
    called: list[str] = []

    @function_tool
    def look(side: Literal["left", "right"]) -> str:
        """Look at a side."""
        called.append(side)
        return "A wall."

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
    agent: Any = Agent(name="Reader", model="signpost", tools=[look], output_type=Sign, model_settings=settings)
    done = await Runner.run(agent, "What is there?", run_config=config, max_turns=3)
    assert len(called) == 1
    assert isinstance(done.final_output, Sign)
