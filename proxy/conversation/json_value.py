"""The end of a JSON object or list in growing text."""

from __future__ import annotations

import re
from typing import Final

_SIGNS: Final = re.compile(r'["\\\[\]{}]')


class JsonValue:
    """Looks for the end of an object or a list that begins at `begin`. Every character is looked at once.

    The value need not be valid JSON. Its end is told once.
    """

    def __init__(self, begin: int) -> None:
        self._next = begin
        self._depth = 0
        self._in_string = False

    def grow(self, text: str) -> int | None:
        """Return the index behind the value in `text`, which begins as before; None while the value goes on."""
        while found := _SIGNS.search(text, self._next):
            sign, self._next = found.group(), found.end()
            if sign == "\\":
                if self._next == len(text):  # the escaped character is still to come
                    self._next -= 1
                    return None
                self._next += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "[{" else -1
                if self._depth <= 0:
                    return self._next
        self._next = max(self._next, len(text))
        return None
