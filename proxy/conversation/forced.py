"""Tool calls that a grammar prescribes: of a named tool, or of one tool at least.

The grammar is written in llguidance's Lark. A named tool's answer is its arguments; otherwise the answer is a list of
{"name", "parameters"}, the form that vLLM prescribes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any, Final

from common.sampling_params import Grammar
from proxy.conversation.calls import Schemas
from proxy.conversation.json_value import JsonValue
from proxy.conversation.parts import AnswerPart, content

MAX_FORCED_CALLS: Final = 16
"""Most calls of an answer that must have one: a weak model would list calls up to the end of the context."""
_KEPT: Final = frozenset(("const", "default", "enum", "example", "examples", "allOf", "not", "if", "then", "else"))
"""Keywords of values, or of schemas of parts of an object."""
_COMPOSED: Final = frozenset(("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties"))
"""Keywords that may add properties to an object."""
_NAMING: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords of schemas by names, and these may read like keywords."""
_ANY_NAME: Final = ("propertyNames", {"type": "string"})
"""What zod writes for each of its records. It allows all names, and llguidance takes no rule for names."""
_HEAD: Final = re.compile(r'\s*\}?\s*[\[,]\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"parameters"\s*:\s*(?=\{)')


def call_grammar(
    tools: Schemas, name: str | None = None, *, single: bool = False, strict: Container[str] = ()
) -> Grammar:
    """Return the grammar of a call of tool `name`, or of calls of any tools.

    Rules of a schema that no grammar holds, such as `uniqueItems`, are left out; those of `strict` tools are refused as
    the grammar is compiled.
    """
    if name is not None:
        return Grammar("grammar", f"start: {_arguments(tools[name], name in strict)}\n")
    more = "" if single else f' (", " call){{0,{MAX_FORCED_CALLS - 1}}}'
    lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"tool_{i}" for i in range(len(tools)))]
    for i, one in enumerate(tools):
        head = json.dumps(f'{{"name": "{one}", "parameters": ')
        lines.append(f'tool_{i}: {head} {_arguments(tools[one], one in strict)} "}}"')
    return Grammar("grammar", "\n".join([*lines, ""]))


def _arguments(schema: Mapping[str, Any] | None, is_strict: bool) -> str:
    given, options = closed(schema or {"properties": {}}), {"whitespace_flexible": False, "lenient": not is_strict}
    schema = {"type": "object", **given, "x-guidance": options}
    return "%json " + json.dumps(schema)


def closed(schema: Any, by_name: bool = False) -> Any:
    """Return a JSON schema whose objects have no properties but those it lists, unless it says otherwise.

    A weak model would invent properties up to the end of the context. `by_name`: the value is schemas by names.
    """
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if by_name:
        return {name: closed(value) for name, value in schema.items()}
    kept = _KEPT | (_COMPOSED if "properties" in schema else frozenset())
    end = {"additionalProperties": False} if "properties" in schema and not schema.keys() & _COMPOSED else {}
    rules = {name: value for name, value in schema.items() if (name, value) != _ANY_NAME}
    return end | {name: value if name in kept else closed(value, name in _NAMING) for name, value in rules.items()}


class NamedCall:
    """Takes the whole answer for the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, *, final: bool = False) -> list[AnswerPart]:
        if not text:
            return []
        begin = [] if self._name is None else [AnswerPart("call", self._name)]
        self._name = None
        return [*begin, AnswerPart("arguments", text)]


class CallList:
    """Takes calls from a list of them; arguments are passed on as they come. What is no such list stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._value: JsonValue | None = None
        self._num_sent = 0
        """Characters of the arguments under way, at the front of the held text, that were passed on."""

    def feed(self, text: str, *, final: bool = False) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while True:
            if self._value is None:
                head = _HEAD.match(self._held)
                if head is None:
                    break
                parts.append(AnswerPart("call", head[1]))
                self._held, self._value, self._num_sent = self._held[head.end() :], JsonValue(0), 0
            end = self._value.grow(self._held)
            parts.append(AnswerPart("arguments", self._held[self._num_sent : end]))
            self._num_sent = len(self._held)
            if end is None:
                return parts
            self._held, self._value = self._held[end:], None
        if final:
            rest = self._held.strip()
            parts += content("" if rest in ("]", "}", "}]") else rest)
        return parts
