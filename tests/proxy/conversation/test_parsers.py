"""Parsers of an assistant's turn: the parts found, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.conversation.calls import CALL_PARSERS
from proxy.conversation.forced import CallList, NamedCall
from proxy.conversation.parts import AnswerParser, merged
from proxy.conversation.thinking import ThinkParser

TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": None,
}
ROME = ("call", "get_weather"), ("arguments", '{"city": "Rome"}')
NOW = ("call", "now"), ("arguments", "{}")
PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[ARGS]",
        ";",
        "[",
        "]",
        ",",
    ),
    *("<function=now>", "</function>", "<function=get_weather>", "<parameter=city>", "</parameter>", "Rome", "\n"),
    *(' {"name": "now", "arguments": {}}', '{"name": "get_weather", "parameters": {"city": "}{\\"<"}}', "{", "}", '"'),
    *("now", "get_weather", '{"city": "Rome"}', "\\", "<", " ", "Sure. ", '"parameters": {'),
]


def parts_of(pieces, thinking, calls):
    parser = AnswerParser(thinking, calls)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return [(part.kind, part.text) for part in merged([*found, *parser.feed("", final=True)])]


def calls_of(name, text, **options):
    whole = parts_of([text], None, CALL_PARSERS[name](TOOLS, **options))
    assert parts_of(text, None, CALL_PARSERS[name](TOOLS, **options)) == whole
    return whole


PARSERS = {
    **{name: lambda kind=kind: (None, kind(TOOLS)) for name, kind in CALL_PARSERS.items()},
    "thinking, then hermes": lambda: (ThinkParser(opened=False), CALL_PARSERS["hermes"](TOOLS)),
    "opened, one call": lambda: (ThinkParser(opened=True), CALL_PARSERS["mistral"](TOOLS, single=True)),
    "a list of calls": lambda: (None, CallList()),
    "a named call": lambda: (ThinkParser(opened=True), NamedCall("now")),
}


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150)
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_cuts_of_a_text_give_the_same_parts(name, text, cuts):
    whole = parts_of([text], *PARSERS[name]())
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parts_of([text[a:b] for a, b in pairwise(edges)], *PARSERS[name]()) == whole
    assert parts_of(text, *PARSERS[name]()) == whole


@pytest.mark.parametrize("name", CALL_PARSERS)
@settings(max_examples=100)
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_text_without_a_valid_call_stays_as_it_is(name, text):
    parts = calls_of(name, text)
    if all(kind == "content" for kind, _ in parts):
        assert "".join(text for _, text in parts) == text
    for kind, value in parts:
        assert kind != "call" or value in TOOLS
        assert kind != "arguments" or isinstance(json.loads(value), dict)


def test_hermes_calls_stand_between_tags_behind_text():
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert calls_of("hermes", text) == [("content", "I look."), *ROME]
    assert calls_of("hermes", f'{text}\n<tool_call>{{"name": "now", "arguments": {{}}}}') == [
        ("content", "I look."),
        *ROME,
        *NOW,
    ]
    assert calls_of("hermes", text + text, single=True) == [("content", "I look."), *ROME, ("content", "I look.")]


def test_a_tag_within_an_argument_does_not_end_a_call():
    call = {"name": "get_weather", "arguments": {"city": '</tool_call> \\ " {'}}
    [(_, name), (_, arguments)] = calls_of("hermes", f"<tool_call>{json.dumps(call)}</tool_call>\n")
    assert (name, json.loads(arguments)) == ("get_weather", call["arguments"])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": []}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}</tool_call>',
        "<tool_call>now</tool_call>",
        "a <tool_call",
        '{"name": "now", "arguments": {}}',
    ],
)
def test_malformed_calls_stay_text(text):
    assert calls_of("hermes", text) == [("content", text)]


def test_a_call_behind_a_malformed_one_is_found():
    text = '<tool_call>{"name": 1}</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert calls_of("hermes", text) == [("content", '<tool_call>{"name": 1}</tool_call>'), *NOW]


def test_arguments_are_text_that_clients_can_read():
    """Half an emoji is escaped, as no UTF-8 has it; NaN and infinity are no JSON."""
    half = '{"name": "now", "arguments": {"q": "a \\ud83d é"}}'
    [_, (_, arguments)] = calls_of("hermes", f"<tool_call>{half}</tool_call>")
    assert json.loads(arguments.encode()) == {"q": "a \ud83d é"}
    for number in ("NaN", "-Infinity", "1e999"):
        text = f'<tool_call>{{"name": "now", "arguments": {{"q": {number}}}}}</tool_call>'
        assert calls_of("hermes", text) == [("content", text)]


def test_llama_calls_are_the_answer_or_follow_the_python_tag():
    call, other = '{"name": "get_weather", "parameters": {"city": "Rome"}}', '{"name": "now", "parameters": {}}'
    assert calls_of("llama3_json", f"{call}; {other}") == [*ROME, *NOW]
    assert calls_of("llama3_json", f"\nSo: <|python_tag|>{call}") == [("content", "\nSo:"), *ROME]
    assert calls_of("llama3_json", '{"a": 1}') == [("content", '{"a": 1}')]
    assert calls_of("llama3_json", f"As in {call}") == [("content", f"As in {call}")]


def test_mistral_calls_are_a_list_or_follow_their_names():
    listed = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]'
    assert calls_of("mistral", listed) == [*ROME, *NOW]
    assert calls_of("mistral", listed, single=True) == [*ROME]
    assert calls_of("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now{}') == [*ROME, *NOW]
    assert calls_of("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2[ARGS]{}") == [*NOW]
    assert calls_of("mistral", f"[TOOL_CALLS][]{listed}", single=True) == [("content", "[TOOL_CALLS][]"), *ROME]


def test_what_is_no_name_of_a_tool_is_text_at_once():
    """Held back until a brace came, a word without end was read again with each of its pieces."""
    parser = CALL_PARSERS["mistral"](TOOLS)
    held = [parser.feed(piece) for piece in ("[TOOL_CALLS]", " now", "a")]
    assert ["".join(part.text for part in parts) for parts in held] == ["", "", "[TOOL_CALLS] nowa"]
    assert calls_of("mistral", "[TOOL_CALLS]later{ [TOOL_CALLS]now{}") == [("content", "[TOOL_CALLS]later{"), *NOW]


def test_xml_values_take_the_type_that_the_schema_gives_them():
    text = """<tool_call>
<function=get_weather>
<parameter=city>
17
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
    assert calls_of("qwen3_coder", text) == [("call", "get_weather"), ("arguments", '{"city": "17", "days": 3}')]


def test_calls_of_qwen3_coder_may_lack_their_outer_tag_and_ends_of_parameters():
    text = "Well.\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>\n</tool_call>"
    found = [("call", "get_weather"), ("arguments", '{"city": "Rome", "days": 3}')]
    assert calls_of("qwen3_coder", text) == [("content", "Well."), *found]
    assert calls_of("qwen3_coder", f"{text}\n<function=now></function>") == [("content", "Well."), *found, *NOW]
    kept = "<tool_call>\n<function=other>\n</function> and <function=now"
    assert calls_of("qwen3_coder", kept) == [("content", kept)]


@pytest.mark.parametrize("name", CALL_PARSERS)
def test_blanks_behind_blanks_are_not_looked_at_again(name):
    """Or a long run of them, piece by piece, takes time by the square of its length."""
    parser = CALL_PARSERS[name](TOOLS)
    with mock.patch.object(parser, "_next", wraps=parser._next) as looked:
        parts = [part for _ in range(4000) for part in parser.feed(" " * 8)]
        assert looked.call_count <= 2
    parts += parser.feed("words", final=True)
    assert [(part.kind, part.text) for part in merged(parts)] == [("content", " " * 8 * 4000 + "words")]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "90210", "90210"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "string", "enum": ["1", "2"]}, "3", "3"),
        ({"type": "string", "anyOf": [{"pattern": "."}]}, '"3"', '"3"'),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/zip"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "3", 3),
        ({"type": ["string", "number"]}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "None", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({}, "False", "False"),
        ({}, "3", 3),
        ({}, '"3"', "3"),
        ({}, "NaN", "NaN"),
    ],
)
def test_xml_values_stay_text_where_the_schema_takes_text_and_not_what_it_reads_as(schema, text, value):
    calls = CALL_PARSERS["qwen3_coder"]({"now": {"properties": {"zip": schema}}})
    given = f"<tool_call><function=now><parameter=zip>{text}</parameter></function></tool_call>"
    [_, (_, arguments)] = parts_of([given], None, calls)
    assert json.loads(arguments) == {"zip": value}


def test_reasoning_comes_first_without_the_blanks_around():
    def parts(text, opened=False):
        whole = parts_of([text], ThinkParser(opened=opened), None)
        assert parts_of(text, ThinkParser(opened=opened), None) == whole
        return whole

    answer = [("reasoning", "two plus\n\ntwo"), ("content", "Four. <think>x</think>")]
    text = "two plus\n\ntwo\n</think>\n\nFour. <think>x</think>"
    assert parts(f"\n<think>\n{text}") == answer
    assert parts(text, opened=True) == answer
    assert parts(f"<think>\n{text}", opened=True) == answer
    assert parts("<think>\n\n</think>\n\nFour.") == [("content", "Four.")]
    assert parts("Four. <think>x</think>") == [("content", "Four. <think>x</think>")]
    assert parts("two plus </thin", opened=True) == [("reasoning", "two plus </thin")]


def test_forced_calls_pass_arguments_on_as_they_come():
    calls = CallList()
    assert calls.feed('[{"name": "get_weather", "par') == []
    assert [part.text for part in calls.feed('ameters": {"city": "R')] == ["get_weather", '{"city": "R']
    assert [part.text for part in calls.feed('o]me"}},{"name": "now", "parameters": {}')] == ['o]me"}', "now", "{}"]
    assert calls.feed("}]", final=True) == []
    assert parts_of(["a red sign"], None, CallList()) == [("content", "a red sign")]
