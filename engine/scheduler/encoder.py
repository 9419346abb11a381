"""Which items the encoder takes next: first come, first served, as many as fit one batch."""

from __future__ import annotations

from typing import TypeAlias

from engine.processors import ProcessedInput

EncoderKey: TypeAlias = tuple[str, int, int]
"""Whatever tells items apart: request id, input id, attempt; or content hash, number, 0."""


class EncoderScheduler:
    """Items that wait to be encoded, whichever requests they belong to.

    A batch is the longest run from the head of the queue within `max_items` items and `max_bytes` bytes of output; an
    item that is larger than the budget goes alone.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._waiting: dict[EncoderKey, ProcessedInput] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: EncoderKey, item: ProcessedInput) -> None:
        """Queue an item; a second one of the same key takes the place of the first."""
        self._waiting[key] = item

    def remove(self, key: EncoderKey) -> None:
        """Forget an item; unknown keys are fine."""
        self._waiting.pop(key, None)

    def next_batch(self) -> list[tuple[EncoderKey, ProcessedInput]]:
        """Take the next batch out of the queue; empty only if nothing waits."""
        batch: list[tuple[EncoderKey, ProcessedInput]] = []
        room_bytes = self._max_bytes
        for key, item in self._waiting.items():
            if batch and (len(batch) == self._max_items or item.size_bytes > room_bytes):
                break
            batch.append((key, item))
            room_bytes -= item.size_bytes
        for key, _ in batch:
            del self._waiting[key]
        return batch
