"""Parts of an assistant's turn, as parsers return them."""

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
