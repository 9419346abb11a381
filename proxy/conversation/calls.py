"""Tool calls that a model writes by itself, a parser per family.

A call becomes a part once it is complete, valid, and names a tool of the request. All else stays text, so that nothing
written by a model is an error. Blanks beside a call belong to no part. The forms are those of the chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from common.text.processor import begun
from proxy.conversation.json_value import JsonValue
from proxy.conversation.parts import AnswerPart, content

Schemas = Mapping[str, Mapping[str, Any] | None]
"""Parameters of each tool, as a JSON schema, by the tool's name."""
_BLANKS: Final = " \t\r\n"
_TYPES: Final[dict[type, tuple[str, ...]]] = {
    str: ("quoted string",),
    int: ("integer", "number"),
    float: ("number",),
    bool: ("boolean",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
}
"""Types of JSON schemas by those of Python. Text in quotes is itself, quotes included, where a schema takes strings."""
_PYTHON: Final = {"True": True, "False": False, "None": None}
"""As the templates of Qwen show values of earlier calls, and their models write them."""


class Malformed(Exception):
    """The text behind a marker is no call."""


class CallParser:
    """Finds calls behind a marker. `single` drops all calls but the first.

    Subclasses say how calls are written, by `_read`.
    """

    marker: str
    head = ""
    """What begins a call whose marker a model has left out, if anything does."""
    trailer = ""
    between = _BLANKS
    """Characters without meaning behind a call."""
    bare = False
    """Whether a call may begin without a marker, at the beginning of an answer or behind a call."""

    def __init__(self, tools: Schemas, *, single: bool = False) -> None:
        self._tools = tools
        self._single = single
        self._num_calls = 0
        self._held = ""
        self._begins = True
        """Whether nothing but calls came so far: blanks before the next call have no meaning."""
        self._trailer = ""
        self._value: JsonValue | None = None

    def feed(self, text: str, *, final: bool = False) -> list[AnswerPart]:
        are_blanks = not final and self._held[-1:].isspace() and not text.strip(_BLANKS)
        self._held += text
        parts: list[AnswerPart] = []
        while not are_blanks and (found := self._next(final)) is not None:  # blanks behind others change nothing
            parts += found
        return parts

    def _read(self, begin: int, final: bool) -> tuple[list[AnswerPart], int] | None:
        """Return the calls that begin at `begin` of the held text, and the index behind; None while they go on.

        Raises Malformed where no call is there.
        """
        raise NotImplementedError

    def _next(self, final: bool) -> list[AnswerPart] | None:
        """Take the next text or call from the held text; None where more text must come first."""
        if self._num_calls and self._begins and not self._skip_between(final):
            return None
        at = self._held.find(self.marker)
        size = len(self.marker)
        if self.bare and self._begins and self._held.lstrip(_BLANKS)[:1] == "{":
            at, size = self._held.index("{"), 0
        if self.head and (head := self._held.find(self.head, 0, at if at >= 0 else None)) >= 0:
            at, size = head, 0
        if at < 0:
            return self._text(final)
        try:
            read = self._read(at + size, final)
        except Malformed:
            read = None
            passed = at + max(size, 1)
        else:
            if read is None and not final:
                text = self._held[:at].rstrip(_BLANKS)
                return self._take(len(text)) if text else None
            passed = len(self._held)
        self._value = None
        if read is None:
            return self._take(passed)
        calls, end = read
        before = self._held[:at].rstrip(_BLANKS)
        self._held, self._begins, self._trailer = self._held[end:], True, self.trailer
        first = not self._num_calls
        self._num_calls += 1
        if self._single:
            calls = calls[:2] if first else []
        return [*content(before), *calls]

    def _skip_between(self, final: bool) -> bool:
        """Drop what stands between calls. Return whether the held text goes on with something else."""
        self._held = self._held.lstrip(self.between)
        if self._trailer and self._held.startswith(self._trailer):
            self._held, self._trailer = self._held[len(self._trailer) :].lstrip(self.between), ""
        if self._held and self._trailer.startswith(self._held):  # half a trailer
            self._held = "" if final else self._held
            return False
        return bool(self._held)

    def _text(self, final: bool) -> list[AnswerPart] | None:
        """Take text up to what may begin a call."""
        known = self._held
        if not final:
            known = known[: len(known) - max(begun(known, self.marker), begun(known, self.head))].rstrip(_BLANKS)
        return self._take(len(known)) if known else None

    def _take(self, size: int) -> list[AnswerPart]:
        text, self._held, self._value = self._held[:size], self._held[size:], None
        self._begins = self._begins and not text.strip(_BLANKS)
        return content(text)

    def _blanks(self, begin: int) -> int:
        """Return the first index from `begin` on without a blank."""
        return len(self._held) - len(self._held[begin:].lstrip(_BLANKS))

    def _json(self, begin: int) -> tuple[Any, int] | None:
        """Return the JSON value that begins at `begin`, and the index behind; None while it goes on."""
        self._value = self._value or JsonValue(begin)
        end = self._value.grow(self._held)
        if end is None:
            return None
        return _parsed(self._held[begin:end]), end

    def _call(self, name: Any, arguments: Any) -> list[AnswerPart]:
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            raise Malformed
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except UnicodeEncodeError:  # half an emoji: it can only be escaped
            text = json.dumps(arguments)
        except ValueError:  # a number beyond any float, which is infinite here
            raise Malformed from None
        return [AnswerPart("call", name), AnswerPart("arguments", text)]

    def _object(self, value: Any) -> list[AnswerPart]:
        """Return the call of {"name", "arguments"}; some models write "parameters"."""
        if not isinstance(value, dict):
            raise Malformed
        return self._call(value.get("name"), value.get("arguments", value.get("parameters")))


class HermesCalls(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    marker, trailer = "<tool_call>", "</tool_call>"

    def _read(self, begin: int, final: bool) -> tuple[list[AnswerPart], int] | None:
        begin = self._blanks(begin)
        if begin == len(self._held):
            return None
        if self._held[begin] != "{":
            raise Malformed
        found = self._json(begin)
        return found and (self._object(found[0]), found[1])


class LlamaCalls(HermesCalls):
    """`{"name": …, "parameters": {…}}`, alone or behind `<|python_tag|>`, several with `;` between: Llama 3."""

    marker, trailer = "<|python_tag|>", ""
    between = _BLANKS + ";"
    bare = True


class MistralCalls(CallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and `[TOOL_CALLS]name[ARGS]{…}` of newer models."""

    marker = "[TOOL_CALLS]"
    _NAME: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?")

    def _read(self, begin: int, final: bool) -> tuple[list[AnswerPart], int] | None:
        begin = self._blanks(begin)
        if self._held[begin : begin + 1] == "[":
            found = self._json(begin)
            if found and not found[0]:
                raise Malformed
            return found and ([part for value in found[0] for part in self._object(value)], found[1])
        head = self._held.find("{", begin)
        if head < 0:
            known = self._held[begin:].partition("[")[0].rstrip(_BLANKS)
            if not any(name.startswith(known) for name in self._tools):
                raise Malformed
            return None
        name = self._NAME.fullmatch(self._held, begin, head)
        if name is None or name[1] not in self._tools:
            raise Malformed
        found = self._json(head)
        return found and (self._call(name[1], found[0]), found[1])


class XmlCalls(CallParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

    A value is text where the tool's schema says so, otherwise JSON, or Python's True, False and None, where it can be
    read as such. As in vLLM, `<tool_call>` and `</parameter>` may be missing, which the models leave out at times.
    """

    marker, head, trailer = "<tool_call>", "<function=", "</tool_call>"
    _HEAD: Final = re.compile(r"\s*<function=([^<>\n]+)>")
    _PARAMETER: Final = re.compile(
        r"\s*<parameter=([^<>\n]+)>\n?(.*?)(?:\n?</parameter>|\n(?=<parameter=)|\n?\Z)", re.DOTALL
    )
    _END: Final = "</function>"

    def _read(self, begin: int, final: bool) -> tuple[list[AnswerPart], int] | None:
        start = self._held[self._blanks(begin) :]
        if not start.startswith(self.head) and not self.head.startswith(start):
            raise Malformed
        end = self._held.find(self._END, begin)
        if end < 0:
            return None
        head = self._HEAD.match(self._held, begin, end)
        if head is None:
            raise Malformed
        schema = self._tools.get(head[1].strip()) or {}
        arguments, at = {}, head.end()
        while found := self._PARAMETER.match(self._held, at, end):
            arguments[found[1]], at = _value(schema, found[1], found[2]), found.end()
        if self._held[at:end].strip():
            raise Malformed
        return self._call(head[1].strip(), arguments), end + len(self._END)


def _parsed(text: str) -> Any:
    """Return the JSON value that a text is. Raises Malformed for all else, also for NaN and Infinity."""
    try:
        return json.loads(text, parse_constant=int)  # which reads none of them
    except (ValueError, RecursionError):
        raise Malformed from None


def _value(schema: Mapping[str, Any], name: str, text: str) -> Any:
    properties = schema.get("properties")
    of_name = properties.get(name) if isinstance(properties, dict) else None
    takes_text = _allows(of_name, ("string",), text)
    try:
        value = _PYTHON[text] if text in _PYTHON and not takes_text else _parsed(text)
    except Malformed:
        return text
    return text if takes_text and not _allows(of_name, _TYPES[type(value)], value) else value


def _allows(schema: Any, types: Collection[str], value: Any) -> bool:
    """Return whether a schema may allow the value, which is of all these types. Only types and enums are looked at."""
    if not isinstance(schema, dict):
        return True
    if (named := schema.get("type")) is not None:
        return any(one in types for one in (named if isinstance(named, list) else [named]))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return any(_allows(one, types, value) for one in schema[name])
    return value in schema["enum"] if isinstance(schema.get("enum"), list) else True


CALL_PARSERS: Final[dict[str, type[CallParser]]] = {
    "hermes": HermesCalls,
    "llama3_json": LlamaCalls,
    "mistral": MistralCalls,
    "qwen3_coder": XmlCalls,
}
"""By the names that vLLM gives them."""
