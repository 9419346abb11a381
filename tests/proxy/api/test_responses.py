"""/v1/responses, through the official client, against fake workers."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

from common.errors import ErrorInfo
from common.messages import Encode, Failed, Generate
from proxy.conversation.store import ResponseStore
from tests.proxy.api.test_tools import CALLS, TEMPLATE, answers, prompt
from tests.proxy.sample_media import audio_part, picture, speech
from tests.proxy.sample_media import image_part as chat_image

NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "metadata"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "safety_identifier"),
    "prompt_cache_key",
}
"""Fields that the Open Responses specification wants of every response."""


class Sign(BaseModel):
    colour: str


@pytest.fixture
async def response_rig(serve, long_text_model):
    async with serve(long_text_model.folder, encoders=0, chat_template=TEMPLATE, response_store_bytes=20_000) as rig:
        yield rig


async def ask(rig, **fields):
    return await rig.client.responses.create(**{"model": rig.service.model_name, "input": "Which?", **fields})


async def test_text_is_answered_with_all_fields_of_a_response(response_rig):
    answer = await ask(response_rig, instructions="Be brief.", max_output_tokens=20, temperature=0, metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.error) == ("a red sign", "completed", None)
    assert answer.model_dump().keys() >= REQUIRED
    assert (answer.instructions, answer.max_output_tokens, answer.temperature) == ("Be brief.", 20, 0)
    assert (await response_rig.http.get(f"/v1/requests/{answer.id}/timeline")).json()["request_id"] == answer.id
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.input_tokens_details.cache_write_tokens == 0
    assert prompt(response_rig).startswith("<system>Be brief.<user>Which?")
    assert response_rig.cluster.decoders[0].of(Generate)[-1].sampling.max_tokens == 20


async def test_a_response_tells_the_sampling_in_effect(response_rig, speech_rig):
    extra = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    answer = (await ask(response_rig, temperature=0.5, top_p=0.25, extra_body=extra)).model_dump()
    assert (answer["temperature"], answer["top_p"]) == (0.5, 0.25)
    assert {name: answer[name] for name in extra} == extra
    answer = await ask(response_rig)
    assert (answer.temperature, answer.top_p) == (1, 1)
    heard = [{"role": "user", "content": [audio_part(speech(1))]}]
    assert (await ask(speech_rig, input=heard)).temperature == 0


async def test_events_of_text_come_in_order_and_are_numbered(response_rig):
    events = [event async for event in await ask(response_rig, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "a red sign"
    assert events[0].response.status == "in_progress"
    assert events[2].item.content == []
    assert events[-1].response.output_text == "a red sign"


async def test_reasoning_text_and_calls_are_items(response_rig):
    answers(response_rig, f"<think>\nhm\n</think>\n\n{CALLS}")
    answer = await ask(response_rig, tools=[NOW, WEATHER])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "hm"
    assert answer.output_text == "I look."
    assert [(item.name, item.arguments) for item in answer.output[2:]] == [
        ("get_weather", '{"city": "Rome"}'),
        ("now", "{}"),
    ]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    model = response_rig.service.model_name
    async with response_rig.client.responses.stream(model=model, input="Which?", tools=[NOW, WEATHER]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


async def test_items_become_the_messages_of_a_chat(response_rig):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hot?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    await ask(response_rig, input=items, tools=[WEATHER], reasoning={"effort": "low"})
    assert "<user>Hot?<assistant>(thought: hm)c1=get_weather:Rome;<tool>rain(of c1)<assistant>low" in prompt(
        response_rig
    ).replace("None", "")


async def test_images_go_to_encoders(rig):
    url = chat_image(picture("red"))["image_url"]["url"]
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    answer = await ask(rig, input=[{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}])
    assert answer.output_text == "a red sign"
    assert len(rig.cluster.encoders[0].of(Encode)) == 1


async def test_a_schema_constrains_the_text_and_a_choice_the_call(response_rig):
    answers(response_rig, '{"colour":"red"}')
    model = response_rig.service.model_name
    parsed = await response_rig.client.responses.parse(model=model, input="Which?", text_format=Sign)
    assert parsed.output_parsed == Sign(colour="red")
    generate = response_rig.cluster.decoders[0].of(Generate)[-1]
    assert generate.sampling.grammar.kind == "json_schema"
    called = await ask(response_rig, tools=[NOW], tool_choice={"type": "function", "name": "now"})
    assert (called.output[0].name, called.output[0].arguments) == ("now", '{"colour":"red"}')


async def test_a_cut_answer_is_incomplete(response_rig):
    answer = await ask(response_rig, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    events = [event async for event in await ask(response_rig, max_output_tokens=2, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_a_failure_in_a_stream_is_told(response_rig):
    decoder = response_rig.cluster.decoders[0]
    decoder.pause_after = 1
    stream = await ask(response_rig, stream=True)
    while (await anext(stream)).type != "response.output_text.delta":
        pass
    generate = decoder.of(Generate)[-1]
    broken = ErrorInfo("internal_error", "no room for messages", "messages")
    await decoder.reply(decoder.proxies[0], Failed(generate.request_id, broken, generate.attempt))
    failed = await anext(stream)
    assert (failed.type, failed.response.error.message) == ("response.failed", "no room for input")
    with pytest.raises(openai.APIError) as caught:
        await anext(stream)
    assert caught.value.param == "input"
    decoder.resume.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_status_and_the_name_of_the_field(response_rig, stream):
    failure = ErrorInfo("context_length_exceeded", "too many tokens in messages", "messages")
    response_rig.cluster.decoders[0].failure = failure
    with pytest.raises(openai.BadRequestError, match="too many tokens in input") as caught:
        await ask(response_rig, stream=stream)
    assert caught.value.param == "input"


async def test_kept_responses_are_continued_fetched_and_forgotten(response_rig):
    first = await ask(response_rig, instructions="Be brief.")
    assert first.store
    again = await response_rig.client.responses.retrieve(first.id)
    assert again.output_text == "a red sign"
    second = await ask(response_rig, input="And now?", previous_response_id=first.id)
    assert prompt(response_rig).startswith("<user>Which?<assistant>a red sign<user>And now?")
    assert second.previous_response_id == first.id
    await response_rig.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await response_rig.client.responses.retrieve(first.id)
    unkept = await ask(response_rig, store=False)
    with pytest.raises(openai.NotFoundError):
        await response_rig.client.responses.retrieve(unkept.id)


async def test_reasoning_goes_on_with_a_kept_response_as_with_its_items(response_rig):
    answers(response_rig, f"<think>hm</think>{CALLS}")
    first = await ask(response_rig, tools=[NOW, WEATHER])
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "rain"} for call in calls]
    await ask(response_rig, tools=[NOW, WEATHER], input=results, previous_response_id=first.id)
    by_id = prompt(response_rig)
    whole = [{"role": "user", "content": "Which?"}, *(item.model_dump() for item in first.output), *results]
    await ask(response_rig, tools=[NOW, WEATHER], input=whole)
    assert "(thought: hm)" in by_id
    assert by_id == prompt(response_rig)


async def test_without_a_budget_nothing_is_kept_and_the_setting_is_named(rig):
    answer = await ask(rig, store=True)
    assert not answer.store
    with pytest.raises(openai.NotFoundError, match="--response-store-bytes"):
        await rig.client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="--response-store-bytes"):
        await ask(rig, previous_response_id=answer.id)


def test_the_store_stays_within_its_budget_and_drops_the_longest_unused():
    store = ResponseStore(1000)
    for name in "abc":
        store.put({"id": name, "text": "x" * 250}, [])
    store.get("a")
    store.put({"id": "d", "text": "x" * 250}, [])
    store.put({"id": "large", "text": "x" * 1000}, [])
    assert store.num_bytes <= 1000
    assert store.get("a")["id"] == "a"
    with pytest.raises(Exception, match="displaced"):
        store.get("b")
    for name in "acd":
        store.delete(name)
    assert store.num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "1 to"),
        ({"input": 5}, "input", "array"),
        ({"input": ["x"]}, "input[0]", "object"),
        ({"tool_choice": 5}, "tool_choice", "object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send it whole, as the AI SDK"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "input_image"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input", "system"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "input: call_id is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "a b"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"horses": 2}, "horses", "not a known field"),
        ({"max_tokens": 2}, "max_tokens", "leave it out; did you mean 'max_output_tokens'"),
        ({"max_completion_tokens": 2}, "max_completion_tokens", "leave it out; did you mean 'max_output_tokens'"),
        ({"instuctions": "x"}, "instuctions", "leave it out; did you mean 'instructions'"),
        ({"min_token": 2}, "min_token", "leave it out; did you mean 'min_tokens'"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "schema"),
    ],
)
async def test_wrong_fields_are_refused_by_their_names_here(response_rig, fields, param, says):
    response = await response_rig.http.post("/v1/responses", json={"input": "x", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param, error
    assert says in error["message"]


async def test_null_counts_as_not_given(response_rig):
    body = {"input": [{"type": None, "role": "user", "content": "x"}], "context_management": None}
    response = await response_rig.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text


async def test_an_empty_schema_permits_any_json(response_rig):
    form = {"type": "json_schema", "name": "any", "schema": {}}
    assert (await ask(response_rig, text={"format": form})).text.format.schema_ == {}
    assert response_rig.cluster.decoders[0].of(Generate)[-1].sampling.grammar.kind == "json_schema"


async def test_the_stream_names_its_events(response_rig):
    response = await response_rig.http.post("/v1/responses", json={"input": "x", "stream": True})
    lines = response.text.split("\n\n")
    assert lines[0].startswith("event: response.created\ndata: {")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3].partition("data: ")[2])["type"] == "response.completed"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_a_number_that_json_has_not_is_refused_where_the_answer_would_repeat_it(response_rig, number):
    tool = {**NOW, "parameters": {"default": "NUMBER"}}
    for name, value in (("metadata", {"a": "NUMBER"}), ("tools", [tool]), ("user", "NUMBER")):
        body = json.dumps({"input": "hi", name: value}).replace('"NUMBER"', number)
        response = await response_rig.http.post("/v1/responses", content=body.encode())
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert response_rig.cluster.decoders[0].of(Generate) == []
