"""openai-python: chat, streams, tools, parsed answers, responses, transcription."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from signs import PICTURE_URL, QUESTION, URL, Sign

ROOT = Path(os.environ["CHECKOUT"])
ASKED = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
MESSAGES: Any = [{"role": "user", "content": ASKED}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def signs() -> OpenAI:
    return OpenAI(base_url=URL, api_key="none", max_retries=0)


@pytest.fixture
def speech() -> OpenAI:
    return OpenAI(base_url=os.environ["SPEECH_URL"] + "/v1", api_key="none", max_retries=0)


def test_pictures(signs: OpenAI) -> None:
    answer = signs.chat.completions.create(model="signpost", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "purple"


async def test_streams() -> None:
    client = AsyncOpenAI(base_url=URL, api_key="none")
    usage = {"include_usage": True}
    stream = await client.chat.completions.create(
        model="signpost", messages=MESSAGES, temperature=0, stream=True, stream_options=usage
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "purple"
    assert chunks[-1].usage.completion_tokens > 0
    async with client.chat.completions.stream(model="signpost", messages=MESSAGES, temperature=0) as helper:
        assert (await helper.get_final_completion()).choices[0].message.content == "purple"


def test_parsed_answers(signs: OpenAI) -> None:
    answer = signs.chat.completions.parse(model="signpost", messages=MESSAGES, temperature=0, response_format=Sign)
    message = answer.choices[0].message
    assert message.content == f'{{"colour":"{message.parsed.colour}"}}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool_calls(signs: OpenAI, choice: Any) -> None:
    asked: Any = {"model": "signpost", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
    answer = signs.chat.completions.create(**asked, temperature=0, parallel_tool_calls=False)
    message = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    after: Any = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    again = signs.chat.completions.create(model="signpost", messages=after, tools=[WEATHER], tool_choice="none")
    assert again.choices[0].message.tool_calls is None
    with signs.chat.completions.stream(**asked, temperature=0, parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments


def test_allowed_tools(signs: OpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }
    answer = signs.chat.completions.create(
        model="signpost",
        messages=MESSAGES,
        tools=[WEATHER, other],
        tool_choice=allowed,
        parallel_tool_calls=False,
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["now"]


def test_responses(signs: OpenAI) -> None:
    content = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": PICTURE_URL}]
    asked: Any = {"model": "signpost", "input": [{"role": "user", "content": content}], "temperature": 0}
    first = signs.responses.create(**asked)
    assert first.output_text == "purple"
    again: Any = {"model": "signpost", "previous_response_id": first.id, "temperature": 0}
    assert signs.responses.create(**again, input="What does the sign say?").output_text == "CAFE"
    assert isinstance(signs.responses.parse(**asked, text_format=Sign).output_parsed, Sign)
    with signs.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "purple"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    called = signs.responses.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert [item.name for item in called.output] == ["get_weather"]


def test_completions_and_log_probabilities(signs: OpenAI) -> None:
    answer = signs.completions.create(model="signpost", prompt="The sign", max_tokens=4, logprobs=2, echo=True, n=2)
    assert len(answer.choices) == 2
    assert all(choice.text.startswith("The sign") for choice in answer.choices)
    assert answer.choices[0].logprobs is not None


def test_models_and_errors(signs: OpenAI) -> None:
    assert [model.id for model in signs.models.list()] == ["signpost"]
    with pytest.raises(openai.NotFoundError):
        signs.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        signs.chat.completions.create(model="signpost", messages=MESSAGES, functions=[{"name": "now"}])
    assert "send tools" in refused.value.message
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        signs.embeddings.create(model="signpost", input="x")


def test_transcription(speech: OpenAI) -> None:
    with (ROOT / "tests/data/amiable.wav").open("rb") as recording:
        words = speech.audio.transcriptions.create(
            model="whisper-1", file=recording, response_format="verbose_json", timestamp_granularities=["word"]
        )
    assert words.words
    assert "amiable" in words.text.lower()
