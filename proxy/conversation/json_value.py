"""The end of a JSON object or list in growing text."""

from __future__ import annotations

import re
from typing import Final

_SIGNS: Final = re.compile(r'["\\\[\]{}]')


class JsonValue:
    """Looks for the end of an object or a list that begins at `begin`. Every character is looked at once.

    `end` is the index behind the value, None while it goes on. The value need not be valid JSON.
    """

    def __init__(self, begin: int) -> None:
        self.end: int | None = None
        self._next = begin
        self._depth = 0
        self._in_string = False

    def grow(self, text: str) -> int | None:
        """Look at the new characters of `text`, which begins as before, and return `end`."""
        while self.end is None and (found := _SIGNS.search(text, self._next)):
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
                    self.end = self._next
        if self.end is None:
            self._next = max(self._next, len(text))
        return self.end
