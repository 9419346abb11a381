"""Parts of an assistant's turn, as parsers return them, and the chain of the parsers of a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(frozen=True)
class AnswerPart:
    """A piece of text. A `call` begins a tool call, with the tool's name as text; `arguments` belong to the last
    call."""

    kind: Kind
    text: str


class Parser(Protocol):
    """An incremental parser. With `final` the text is complete, and nothing is held back."""

    def feed(self, text: str, *, final: bool = False) -> list[AnswerPart]: ...


def merged(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Join neighbours of a kind; two calls stay two."""
    joined: list[AnswerPart] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind != "call":
            joined[-1] = AnswerPart(part.kind, joined[-1].text + part.text)
        elif part.text:
            joined.append(part)
    return joined


def content(text: str) -> list[AnswerPart]:
    return [AnswerPart("content", text)] if text else []


@dataclass
class AnswerParser:
    """Chains the parsers of an answer. Calls are looked for outside of reasoning only."""

    thinking: Parser | None = None
    calls: Parser | None = None

    def feed(self, text: str, *, final: bool = False) -> list[AnswerPart]:
        """Return the parts that are known with `text`; all of them where the text is `final`."""
        parts = content(text) if self.thinking is None else self.thinking.feed(text, final=final)
        if self.calls is None:
            return merged(parts)
        found: list[AnswerPart] = []
        for part in parts:
            found += self.calls.feed(part.text) if part.kind == "content" else [part]
        if final:
            found += self.calls.feed("", final=True)
        return merged(found)
