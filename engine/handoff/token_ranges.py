"""Received tokens of a range; parts may have any size and order."""

from __future__ import annotations


class TokenRanges:
    """Missing tokens of `first` to `last` (not included)."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._missing = [(first, last)] if first < last else []

    @property
    def complete(self) -> bool:
        return not self._missing

    def within(self, first: int, last: int) -> bool:
        """Return True for a nonempty part of the range."""
        return self.first <= first < last <= self.last

    def has(self, first: int, last: int) -> bool:
        """Return True if all of `first` to `last` have come."""
        return all(end <= first or last <= begin for begin, end in self._missing)

    def add(self, first: int, last: int) -> None:
        """Mark `first` to `last` as received."""
        left = [(begin, min(end, first)) for begin, end in self._missing]
        right = [(max(begin, last), end) for begin, end in self._missing]
        self._missing = sorted({(begin, end) for begin, end in left + right if begin < end})
