"""LiteLLM with its providers `openai` and `hosted_vllm`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import litellm
import pytest
from signs import PICTURE_URL, QUESTION, URL, Sign

SERVER: Any = {"api_base": URL, "api_key": "none"}
ROOT = Path(os.environ["CHECKOUT"])
ASKED: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": QUESTION},
            {"type": "image_url", "image_url": {"url": PICTURE_URL}},
        ],
    }
]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"side": {"enum": ["left", "right"]}},
            "required": ["side"],
            "additionalProperties": False,
        },
    },
}
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


def ask(provider: str, **fields: Any) -> Any:
    fields = {"messages": ASKED, "temperature": 0, **SERVER, **fields}
    return litellm.completion(model=f"{provider}/signpost", **fields)


@PROVIDERS
def test_chat(provider: str) -> None:
    answer = ask(provider)
    assert answer.choices[0].message.content == "purple"
    assert answer.usage.completion_tokens > 0
    chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "purple"
    assert Sign.model_validate_json(ask(provider, response_format=Sign).choices[0].message.content)


@PROVIDERS
def test_tools(provider: str) -> None:
    forced: Any = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
    calls = ask(provider, **forced).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["look"]
    chunks = list(ask(provider, **forced, stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    assert [call.function.arguments for call in whole.choices[0].message.tool_calls] == [calls[0].function.arguments]


@PROVIDERS
def test_responses(provider: str) -> None:
    asked: Any = {"model": f"{provider}/signpost", "input": "Hello?", "max_output_tokens": 8, **SERVER}
    assert litellm.responses(**asked).output[0].type == "message"
    events = list(litellm.responses(**asked, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")


async def test_anthropic_bridge() -> None:
    asked: Any = [{"role": "user", "content": "Hello?"}]
    answer: Any = await litellm.anthropic.messages.acreate(
        model="hosted_vllm/signpost", messages=asked, max_tokens=8, **SERVER
    )
    assert answer["content"][0]["type"] == "text"


@PROVIDERS
def test_text_completion(provider: str) -> None:
    answer = litellm.text_completion(model=f"{provider}/signpost", prompt="The sign", max_tokens=4, **SERVER)
    assert isinstance(answer.choices[0].text, str)


@PROVIDERS
def test_transcription(provider: str) -> None:
    speech = os.environ["SPEECH_URL"] + "/v1"
    with (ROOT / "tests/data/amiable.wav").open("rb") as recording:
        answer = litellm.transcription(model=f"{provider}/whisper-1", file=recording, api_base=speech, api_key="none")
    assert "amiable" in answer.text.lower()
