"""The cases of the Open Responses specification's compliance suite, held to the fields that it requires."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.api.test_responses import REQUIRED
from tests.proxy.api.test_tools import TEMPLATE, answers
from tests.proxy.sample_media import image_part, picture

LOCATION = {"location": {"type": "string", "description": "City and country."}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather now.",
    "parameters": {"type": "object", "properties": LOCATION, "required": ["location"]},
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "Oslo"}}</tool_call>'
ITEMS = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
}
PLACE = {"item_id": str, "output_index": int}
TEXT_PLACE = {**PLACE, "content_index": int}
EVENTS = {
    "response.created": {"response": dict},
    "response.in_progress": {"response": dict},
    "response.completed": {"response": dict},
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.content_part.added": {**TEXT_PLACE, "part": dict},
    "response.content_part.done": {**TEXT_PLACE, "part": dict},
    "response.output_text.delta": {**TEXT_PLACE, "delta": str, "logprobs": list},
    "response.output_text.done": {**TEXT_PLACE, "text": str, "logprobs": list},
    "response.function_call_arguments.delta": {**PLACE, "delta": str},
    "response.function_call_arguments.done": {**PLACE, "arguments": str},
}
"""Fields that each event must have, with their types."""
SAID = {"type": "message", "role": "user", "content": "Hello."}
CASES = {
    "basic": [SAID],
    "system": [{"type": "message", "role": "system", "content": "Speak like a sailor."}, SAID],
    "turns": [SAID, {"type": "message", "role": "assistant", "content": "Hello Ann."}, SAID],
}


def check(value: dict[str, Any], fields: dict[str, type]) -> None:
    assert {name: type(value.get(name)) for name in fields} == fields


def check_response(response: dict[str, Any], kind: str) -> None:
    assert response.keys() >= REQUIRED
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert [item["type"] for item in response["output"]] == [kind]
    assert all(tool.keys() >= {"type", "name", "description", "parameters", "strict"} for tool in response["tools"])
    counts = ("input_tokens", "output_tokens", "total_tokens")
    details = {"input_tokens_details": {"cached_tokens": int}, "output_tokens_details": {"reasoning_tokens": int}}
    check(response["usage"], {**dict.fromkeys(counts, int), **dict.fromkeys(details, dict)})
    for name, fields in details.items():
        check(response["usage"][name], fields)
    for item in response["output"]:
        check(item, ITEMS[kind])
        for part in item.get("content", ()):
            check(part, {"type": str, "text": str, "annotations": list, "logprobs": list})


@pytest.fixture
async def text_rig(serve, long_text_model):
    async with serve(long_text_model.folder, encoders=0, chat_template=TEMPLATE) as rig:
        yield rig


async def post(rig, **fields):
    response = await rig.http.post("/v1/responses", json={"model": rig.service.model_name, **fields})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("case", CASES)
async def test_conversations_are_answered(text_rig, case):
    check_response((await post(text_rig, input=CASES[case], stream=False)).json(), "message")


async def test_images_are_answered(rig):
    url = image_part(picture("red"))["image_url"]["url"]
    content = [{"type": "input_text", "text": "What is here?"}, {"type": "input_image", "image_url": url}]
    check_response((await post(rig, input=[{**SAID, "content": content}])).json(), "message")


async def test_tools_are_called(text_rig):
    answers(text_rig, CALL)
    check_response((await post(text_rig, input=[SAID], tools=[TOOL])).json(), "function_call")


@pytest.mark.parametrize("kind", ["message", "function_call"])
async def test_events_have_their_fields_and_end_with_the_response(text_rig, kind):
    tools = [] if kind == "message" else [TOOL]
    if tools:
        answers(text_rig, CALL)
    text = (await post(text_rig, input=[SAID], tools=tools, stream=True)).text
    blocks = [block.split("\ndata: ", 1) for block in text.split("\n\n") if block.startswith("event: ")]
    events = [json.loads(data) for _, data in blocks]
    assert [head for head, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check(event, EVENTS[event["type"]])
    kinds = {event["type"] for event in events}
    assert kinds >= {name for name in EVENTS if ("arguments" in name if tools else "text" in name)}
    items = [event["item"]["type"] for event in events if event["type"].startswith("response.output_item.")]
    assert items == [kind, kind]
    check_response(events[-1]["response"], kind)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones_that_can_be_called(text_rig, mode):
    answers(text_rig, CALL if mode == "auto" else '[{"name": "get_weather", "parameters": {"location": "Oslo"}}]')
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_weather"}]}
    other = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    response = (await post(text_rig, input=[SAID], tools=[TOOL, other], tool_choice=allowed)).json()
    check_response(response, "function_call")
    assert response["tool_choice"] == allowed
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "now"]
