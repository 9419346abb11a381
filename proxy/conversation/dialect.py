"""How a model writes reasoning and calls, and whether its chat template shows tools: read from the template's text."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from common.text.processor import text_of
from proxy.conversation.calls import CALL_PARSERS, CallParser

_SIGNS: Final = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
_TOOLS: Final = re.compile(r"\btools\b")
_MISTRAL_ID: Final = string.ascii_letters + string.digits
_EXPLAINED: Final = """\
You can call these functions:
{tools}
To call one, write its name and its arguments in this form, and nothing else:
<tool_call>{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}</tool_call>
The results come in <tool_response></tool_response>."""


@dataclass(frozen=True)
class Dialect:
    """`calls` is a name of CALL_PARSERS, None where calls stay text. `thinks`: reasoning is looked for."""

    calls: str | None
    thinks: bool
    knows_tools: bool

    @property
    def call_parser(self) -> type[CallParser] | None:
        return None if self.calls is None else CALL_PARSERS[self.calls]

    def new_call_id(self) -> str:
        """Return an id for a call. Templates of Mistral take nine letters or digits only."""
        if self.calls == "mistral":
            return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def choose(template: str | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
    """Return the dialect of a chat template; a parser other than "auto" has precedence ("none": no parser).

    A template without tools gets them by `explained`, and its model's calls are read in the form told there.
    """
    text = template or ""
    knows_tools = bool(_TOOLS.search(text))
    calls = next((name for sign, name in _SIGNS if sign in text), None) if knows_tools else "hermes"
    if tool_call_parser != "auto":
        calls = None if tool_call_parser == "none" else tool_call_parser
    thinks = "</think>" in text or "<think>" in text if reasoning_parser == "auto" else reasoning_parser == "think"
    return Dialect(calls, thinks, knows_tools)


def explained(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools: a system text shows them, and calls and results are text.

    `messages` are as for chat templates, with arguments as objects.
    """
    told: list[dict[str, Any]] = []
    for are_results, run in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            parts = [part for message in run for part in _result(message["content"])]
            has_media = any(part["type"] != "text" for part in parts)
            told.append({"role": "user", "content": parts if has_media else text_of(parts)})
        else:
            told += map(_without_calls, run)
    if not tools:
        return told
    system = _EXPLAINED.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if told and told[0]["role"] == "system":
        first = {"role": "system", "content": f"{text_of(told[0]['content'])}\n\n{system}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": system}, *told]


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls as text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>" for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "\n".join(filter(None, [text_of(message["content"]), *calls]))}


def _result(content: Any) -> list[dict[str, Any]]:
    """Return a result as text, and its media behind."""
    media = [] if isinstance(content, str) else [part for part in content if part["type"] != "text"]
    return [{"type": "text", "text": f"<tool_response>{text_of(content)}</tool_response>"}, *media]
