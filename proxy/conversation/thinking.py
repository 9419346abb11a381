"""Reasoning between `<think>` and `</think>`, as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

from typing import Final

from common.text.processor import begun
from proxy.conversation.parts import AnswerPart, content

BEGIN: Final = "<think>"
END: Final = "</think>"


class ThinkParser:
    """Takes reasoning from the beginning of an answer; blanks around reasoning belong to no part.

    `opened`: the prompt has the opening tag, so that the answer begins within. Otherwise only an answer that begins
    with the tag has reasoning.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "before" if not opened else "opened"
        self._held = ""

    def feed(self, text: str, *, final: bool = False) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        if self._state in ("before", "opened"):
            self._open(final)
        if self._state == "begun":
            self._held = self._held.lstrip()
            self._state = "thinking" if self._held else "begun"
        if self._state == "thinking":
            parts = self._think(final)
        if self._state == "thought":
            self._held = self._held.lstrip()
            self._state = "after" if self._held else "thought"
        if self._state == "after":
            parts += content(self._held)
            self._held = ""
        return parts

    def _open(self, final: bool) -> None:
        """Pass the opening tag, where there is one. An open thought may repeat it."""
        start = self._held.lstrip()
        if start.startswith(BEGIN):
            self._held, self._state = start[len(BEGIN) :], "begun"
        elif final or not BEGIN.startswith(start):
            self._state = "after" if self._state == "before" else "begun"

    def _think(self, final: bool) -> list[AnswerPart]:
        before, end, after = self._held.partition(END)
        if end:
            self._held, self._state = after, "thought"
            return [AnswerPart("reasoning", before.rstrip())] if before.rstrip() else []
        known = self._held if final else self._held[: len(self._held) - begun(self._held, END)]
        known = known.rstrip()
        self._held = self._held[len(known) :]
        return [AnswerPart("reasoning", known)] if known else []
