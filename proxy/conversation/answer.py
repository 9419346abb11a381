"""The parts of an answer: reasoning first, then text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.conversation.parts import AnswerPart, Parser, content, merged


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
