"""Tools and reasoning in chats, through the official client, against fake workers."""

from __future__ import annotations

import json
import re

import openai
import pytest

from common.errors import ErrorInfo
from common.messages import Encode, Generate
from common.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from proxy.conversation.dialect import Dialect
from tests.proxy.sample_media import image_part, picture
from tests.proxy.streams import events

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
TEMPLATE = """\
{%- for tool in tools or [] %}[tool {{ tool | tojson }}]{% endfor -%}
{%- for message in messages %}
<{{ message.role }}>{{ message.content }}
{%- if message.reasoning_content %}(thought: {{ message.reasoning_content }}){% endif %}
{%- for call in message.tool_calls or [] %}{{ call.id }}={{ call.function.name -}}
:{{ call.function.arguments.city }};{% endfor %}
{%- if message.tool_call_id %}(of {{ message.tool_call_id }}){% endif %}
{%- endfor %}
<assistant>{{ reasoning_effort }}{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}
{#- <tool_call> <think></think> -#}
"""
OPENED = TEMPLATE + "<think>\n"
USER = {"role": "user", "content": "How is the weather?"}


@pytest.fixture
async def tool_rig(serve, long_text_model):
    async with serve(long_text_model.folder, encoders=0, chat_template=TEMPLATE) as rig:
        yield rig


def tool_of(size, name="a"):
    """A tool whose parameters are of `size` bytes and a little more."""
    parameters = {"type": "object", "description": "x" * size}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(*names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


def answers(rig, text):
    rig.cluster.decoders[0].answer = lambda message: text


def prompt(rig):
    return rig.cluster.text.decode(rig.cluster.decoders[0].of(Generate)[-1].prompt_token_ids)


async def ask(rig, **fields):
    fields = {"messages": [USER], "tools": [WEATHER, NOW], **fields}
    return await rig.client.chat.completions.create(model=rig.service.model_name, **fields)


async def streamed(rig, **fields):
    """The deltas of a stream joined as clients join them, and the chunks."""
    chunks = [chunk async for chunk in await ask(rig, stream=True, **fields)]
    message = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(message["calls"]), "function", "")
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments
    return message, chunks


async def test_calls_of_the_model_are_found_and_text_before_them_stays(tool_rig):
    answers(tool_rig, CALLS)
    answer = await ask(tool_rig)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"city": "Rome"}'),
        ("now", "{}"),
    ]
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in message.tool_calls)
    assert '"get_weather"' in prompt(tool_rig)
    assert "strict" not in prompt(tool_rig)


async def test_calls_are_streamed_head_first(tool_rig):
    answers(tool_rig, CALLS)
    message, chunks = await streamed(tool_rig)
    assert message["content"] == "I look."
    assert message["calls"] == [["get_weather", '{"city": "Rome"}'], ["now", "{}"]]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    final = await ask_stream_helper(tool_rig)
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["get_weather", "now"]


async def ask_stream_helper(rig):
    stream = rig.client.chat.completions.stream(model=rig.service.model_name, messages=[USER], tools=[WEATHER, NOW])
    async with stream as held:
        return await held.get_final_completion()


async def test_text_that_is_no_call_stays_text(tool_rig):
    text = '<tool_call>{"name": "other", "arguments": {}}</tool_call> and <tool_call>{"name'
    answers(tool_rig, text)
    answer = await ask(tool_rig)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.choices[0].message.tool_calls is None
    message, chunks = await streamed(tool_rig)
    assert (message["content"], chunks[-1].choices[0].finish_reason) == (text, "stop")


async def test_one_call_only_without_parallel_calls(tool_rig):
    answers(tool_rig, CALLS)
    answer = await ask(tool_rig, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]


async def test_no_tools_are_shown_or_called_with_the_choice_none(tool_rig):
    answers(tool_rig, CALLS)
    answer = await ask(tool_rig, tool_choice="none")
    assert answer.choices[0].message.content == CALLS
    assert "get_weather" not in prompt(tool_rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_required_calls_follow_a_grammar_of_all_tools(tool_rig, stream):
    answers(tool_rig, '[{"name": "now", "parameters": {}},{"name": "get_weather", "parameters": {"city": "R"}}]')
    if stream:
        message, chunks = await streamed(tool_rig, tool_choice="required")
        assert message["calls"] == [["now", "{}"], ["get_weather", '{"city": "R"}']]
        assert not message["content"]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        choice = (await ask(tool_rig, tool_choice="required")).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["now", "get_weather"]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    grammar = tool_rig.cluster.decoders[0].of(Generate)[-1].sampling.grammar
    assert grammar.kind == "grammar"
    assert "get_weather" in grammar.text
    assert "(no thoughts)" in prompt(tool_rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_call_is_its_arguments(tool_rig, stream):
    answers(tool_rig, '{"city":"Rome"}')
    fields = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    fields["response_format"] = {"type": "json_object"}
    if stream:
        tool_rig.read_one_by_one()
        message, chunks = await streamed(tool_rig, **fields)
        assert message["calls"] == [["get_weather", '{"city":"Rome"}']]
        assert len(chunks) > 4
    else:
        choice = (await ask(tool_rig, **fields)).choices[0]
        assert choice.message.tool_calls[0].function.arguments == '{"city":"Rome"}'
    grammar = tool_rig.cluster.decoders[0].of(Generate)[-1].sampling.grammar
    assert isinstance(grammar, Grammar)
    assert "now" not in grammar.text


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_shown_and_called(tool_rig, mode):
    answers(tool_rig, CALLS if mode == "auto" else '[{"name": "now", "parameters": {}}]')
    choice = {"type": "allowed_tools", "allowed_tools": {**allowed("now")["allowed_tools"], "mode": mode}}
    message = (await ask(tool_rig, tool_choice=choice)).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["now"]
    assert "get_weather" not in prompt(tool_rig)


async def test_a_forced_call_that_is_cut_ends_with_length(tool_rig):
    answers(tool_rig, '[{"name": "get_weather", "parameters": {"city": "Rome"}}]')
    whole = len(tool_rig.cluster.text.encode('[{"name": "get_weather", "parameters": {"ci'))
    message, chunks = await streamed(tool_rig, tool_choice="required", max_tokens=whole)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert message["calls"][0][0] == "get_weather"


async def test_calls_results_and_reasoning_go_through_the_template(tool_rig):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]}
    await ask(tool_rig, messages=[USER, turn, result], reasoning_effort="low")
    assert "<assistant>(thought: hm)c1=get_weather:Rome;" in prompt(tool_rig)
    assert "<tool>rain(of c1)<assistant>low" in prompt(tool_rig)


async def test_an_earlier_call_may_leave_out_what_null_stands_for(tool_rig):
    call = {"id": None, "type": None, "function": {"name": "now", "arguments": None}}
    response = await tool_rig.http.post(
        "/tokenize", json={"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    )
    assert response.status_code == 200, response.text
    assert "=now:" in tool_rig.cluster.text.decode(response.json()["tokens"])


async def test_half_an_emoji_in_earlier_arguments_is_written_as_a_replacement(tool_rig):
    call = {"id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Rome \\ud83d!"}'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    response = await tool_rig.http.post("/tokenize", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert "c1=get_weather:Rome \ufffd!;" in tool_rig.cluster.text.decode(response.json()["tokens"])


async def test_a_template_without_tools_gets_them_as_text(serve, long_text_model):
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"in": "Zürich"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "So:", "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]
    async with serve(long_text_model.folder, encoders=0, chat_template=plain) as rig:
        answers(rig, CALLS)
        answer = await ask(rig, messages=messages)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather", "now"]
        shown = prompt(rig)
    assert shown.startswith("<system>Be brief.\n\nYou can call")
    assert '{"name": "now"}' in shown
    assert '<assistant>So:\n<tool_call>{"name": "now", "arguments": {"in": "Zürich"}}</tool_call>' in shown
    assert "<user><tool_response>one</tool_response>\n<tool_response>two</tool_response><assistant>" in shown


async def test_the_picture_of_a_result_goes_to_a_model_whose_template_knows_no_tools(rig):
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    seen = [{"type": "text", "text": "a screen"}, image_part(picture())]
    result = {"role": "tool", "tool_call_id": "c1", "content": seen}
    await ask(rig, messages=[USER, {"role": "assistant", "tool_calls": [call]}, result])
    assert len(rig.cluster.encoders[0].of(Encode)) == 1
    assert len(rig.cluster.decoders[0].of(Generate)[-1].inputs) == 1
    assert "<tool_response>a screen</tool_response>" in prompt(rig)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        (
            {"tools": [tool_of(MAX_GRAMMAR_BYTES)], "tool_choice": {"type": "function", "function": {"name": "a"}}},
            "tools[0].function.parameters",
            "65536",
        ),
        ({"tools": [tool_of(40_000), tool_of(40_000, "b")], "tool_choice": "required"}, "tools", "65536"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "'now'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "'a'",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type", "function"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "get_weather"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": allowed("b")}, "tool_choice", "'b'"),
        ({"tool_choice": allowed()}, "tool_choice.allowed_tools.tools", "at least 1"),
        ({"tool_choice": "always"}, "tool_choice", "required"),
        ({"functions": [{"name": "a"}]}, "functions", "send tools"),
        ({"function_call": {"name": "a"}}, "function_call", "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "a"}}]}]}, "messages[0]", "assistant"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "tool_choice"),
    ],
)
async def test_wrong_tools_are_refused_by_name(tool_rig, fields, param, says):
    body = {"messages": [USER], "tools": [WEATHER], **fields}
    error = (await tool_rig.http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == param
    assert says in error["message"]


async def test_a_schema_refused_by_the_worker_names_the_tool(tool_rig):
    tool_rig.cluster.decoders[0].failure = ErrorInfo("invalid_request", "the grammar is wrong", "grammar")
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(tool_rig, tool_choice={"type": "function", "function": {"name": "now"}})
    assert refused.value.param == "tools[1].function.parameters"


async def test_speech_models_call_no_tools(speech_rig):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [NOW]}
    assert (await speech_rig.http.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.parametrize(("template", "begin"), [(TEMPLATE, "<think>\n"), (OPENED, "")])
async def test_reasoning_has_fields_of_its_own(serve, long_text_model, template, begin):
    async with serve(long_text_model.folder, encoders=0, chat_template=template) as rig:
        answers(rig, begin + "two plus two\n</think>\n\nFour." + CALLS)
        message = (await ask(rig)).choices[0].message
        assert (message.content, message.reasoning_content) == ("Four.I look.", "two plus two")
        assert message.reasoning == message.reasoning_content
        assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
        joined, _ = await streamed(rig)
        assert (joined["content"], joined["reasoning"]) == ("Four.I look.", "two plus two")
        assert len(joined["calls"]) == 2


@pytest.mark.parametrize(
    "fields",
    [{"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}],
)
async def test_without_thinking_nothing_is_reasoning(serve, long_text_model, fields):
    async with serve(long_text_model.folder, encoders=0, chat_template=OPENED) as rig:
        answers(rig, "<think>\nx</think>")
        message = (await ask(rig, tools=[NOW], **fields)).choices[0].message
        assert message.content == "<think>\nx</think>"
        assert prompt(rig).endswith("(no thoughts)<think>\n\n</think>\n\n")


async def test_a_constrained_answer_does_not_think(serve, long_text_model):
    async with serve(long_text_model.folder, encoders=0, chat_template=OPENED) as rig:
        answers(rig, '{"a":1}')
        message = (await ask(rig, tools=[NOW], response_format={"type": "json_object"})).choices[0].message
        assert message.content == '{"a":1}'
        assert prompt(rig).endswith("</think>\n\n")


async def test_an_answer_of_a_given_form_is_streamed_as_text_whatever_it_looks_like(serve, long_text_model):
    text = '{"name": "now", "parameters": {}}'
    async with serve(long_text_model.folder, encoders=0, chat_template=TEMPLATE, tool_call_parser="llama3_json") as rig:
        answers(rig, text)
        rig.read_one_by_one()
        message, chunks = await streamed(rig, response_format={"type": "json_object"})
        assert (message["content"], message["calls"], chunks[-1].choices[0].finish_reason) == (text, [], "stop")
        assert len(chunks) > 4


async def test_settings_turn_parsers_off(serve, long_text_model):
    off = {"tool_call_parser": "none", "reasoning_parser": "none"}
    async with serve(long_text_model.folder, encoders=0, chat_template=TEMPLATE, **off) as rig:
        answers(rig, f"<think>a</think>{CALLS}")
        message = (await ask(rig)).choices[0].message
        assert message.content == f"<think>a</think>{CALLS}"


async def test_held_back_text_still_shows_its_tokens(tool_rig):
    answers(tool_rig, CALLS)
    body = {"messages": [USER], "tools": [WEATHER, NOW], "stream": True, "return_token_ids": True, "logprobs": True}
    chunks = [chunk["choices"][0] for chunk in events(await tool_rig.http.post("/v1/chat/completions", json=body))]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    assert tool_rig.cluster.text.decode(ids) == CALLS
    assert sum(len((chunk["logprobs"] or {"content": []})["content"]) for chunk in chunks) == len(ids)


def test_ids_of_mistral_are_nine_letters_or_digits():
    assert re.fullmatch("[a-zA-Z0-9]{9}", Dialect("mistral", False, True).new_call_id())
    assert json.dumps(Dialect("hermes", False, True).new_call_id()).startswith('"call_')
