"""Generated tokens of a sequence, maintained token by token, for rules over the past."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.state.spec import IntArray

FloatArray = npt.NDArray[np.float32]


class TokenCounts:
    """Occurring tokens, and counts of generated tokens. An append is O(1)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self._ids: IntArray = np.zeros(64, np.int64)
        self._counts: FloatArray = np.zeros(64, np.float32)

    def append(self, token_id: int, *, is_output: bool) -> None:
        # A placeholder of media may have an id for which the model has no logit.
        if token_id >= self._vocab_size:
            return
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids, self._counts = _doubled(self._ids), _doubled(self._counts)
        self._ids[index] = token_id
        self._counts[index] += is_output

    @property
    def seen(self) -> IntArray:
        """Ids of the prompt and the output, each once."""
        return self._ids[: len(self._index)]

    @property
    def generated(self) -> tuple[IntArray, FloatArray]:
        """Return the distinct ids of the output and their counts."""
        counts = self._counts[: len(self._index)]
        occurring = counts > 0
        return self.seen[occurring], counts[occurring]


class NGrams:
    """The n-grams of a sequence: earlier successors of the last n - 1 tokens (Paulus et al., 2017)."""

    def __init__(self, size: int, vocab_size: int) -> None:
        self._size, self._vocab_size = size, vocab_size
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._tail: deque[int] = deque(maxlen=size - 1)

    def append(self, token_id: int) -> None:
        if len(self._tail) == self._size - 1 and token_id < self._vocab_size:
            self._followers.setdefault(tuple(self._tail), []).append(token_id)
        self._tail.append(token_id)

    def completing(self) -> list[int]:
        """Return the tokens that would repeat an n-gram."""
        return self._followers.get(tuple(self._tail), [])


class BadWords:
    """Forbidden token sequences: the last token of each is forbidden after the preceding tokens."""

    def __init__(self, sequences: Iterable[Sequence[int]], eos_token_ids: Sequence[int]) -> None:
        self._single: list[int] = []
        self._by_end: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in sequences:
            if before:
                self._by_end.setdefault(before[-1], []).append((before, last))
            elif last not in eos_token_ids:  # a sequence that cannot end would be worse than a bad word
                self._single.append(last)

    def completing(self, token_ids: list[int]) -> list[int]:
        longer = self._by_end.get(token_ids[-1], ()) if token_ids else ()
        return self._single + [last for before, last in longer if token_ids[-len(before) :] == before]


def _doubled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([array, np.zeros_like(array)])
