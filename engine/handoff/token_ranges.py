"""Which tokens of a range have come, where they come in parts of any size and order."""

from __future__ import annotations


class TokenRanges:
    """The tokens of `first` to `last` (not included) that are still missing."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._missing = [(first, last)] if first < last else []

    @property
    def complete(self) -> bool:
        return not self._missing

    def within(self, first: int, last: int) -> bool:
        """Whether this is a part of the range: not empty, and nothing of it outside."""
        return self.first <= first < last <= self.last

    def has(self, first: int, last: int) -> bool:
        """Whether all of these tokens have come."""
        return all(end <= first or last <= begin for begin, end in self._missing)

    def add(self, first: int, last: int) -> None:
        """These tokens have come."""
        left = [(begin, min(end, first)) for begin, end in self._missing]
        right = [(max(begin, last), end) for begin, end in self._missing]
        self._missing = sorted({(begin, end) for begin, end in left + right if begin < end})
