"""Which instance probably has the beginning of a prompt, or its media, in its caches: remembered by hashes.

The keys of a prompt, the most telling first, for CHUNK_TOKENS = 64 and a picture among tokens 64 to 127:

    tokens   0 ........ 63 | 64 .. picture .. 127 | 128 ...
    keys     |--- k1 ----|                                     what begins alike has the same k1, ...
             |----------------- k2 ---------------|            ... k2 only with the same picture
    list     [k2, k1, picture]
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from proxy.dispatch.jobs import Job

CHUNK_TOKENS: Final = 64
MAX_CHUNKS: Final = 256
"""Of one prompt; what is longer than 16,384 tokens is told apart by them."""
MAX_KEYS: Final = 20_000
"""Remembered: a million tokens, in 0.3 MiB."""
WAYS: Final = 8


def cache_keys(job: Job) -> list[bytes]:
    """Keys of what an instance has in its caches once it has computed this job, the most telling first.

    A decoder's own blocks depend on what cross-attention reads, so where inputs are not in the prompt they begin every
    chain.
    """
    in_prompt = {slot.prompt_index: slot.content_hash for slot in job.slots if slot.prompt_index is not None}
    chain = "".join(slot.content_hash for slot in job.slots if slot.prompt_index is None).encode()
    prefixes: list[bytes] = []
    tokens = job.prompt_token_ids
    for start in range(0, min(len(tokens) - CHUNK_TOKENS + 1, MAX_CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS):
        digest = hashlib.blake2b(chain, digest_size=16)
        digest.update(array("q", tokens[start : start + CHUNK_TOKENS]).tobytes())
        for index in sorted(in_prompt.keys() & range(start, start + CHUNK_TOKENS)):
            digest.update(in_prompt[index].encode())
        chain = digest.digest()
        prefixes.append(chain)
    return [*reversed(prefixes), *(slot.content_hash.encode() for slot in job.slots)]


class AffinityMap:
    """Which instance had what last: a table of fixed size, like a processor's cache. A key has WAYS places that it may
    be in, and of the keys that share them the least recently used is forgotten first."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._num_ways = min(WAYS, max_keys)
        self._num_sets = max_keys // self._num_ways
        size = self._num_sets * self._num_ways
        self._hashes = array("q", bytes(8 * size))
        self._instances = [""] * size  # beside them; "" where nothing is known

    def remember(self, keys: Iterable[bytes], instance_id: str) -> None:
        """The instance will have these in its caches."""
        for key in keys:
            first, place = self._look_up(key)
            last = first + self._num_ways - 1 if place is None else place
            self._hashes[first + 1 : last + 1] = self._hashes[first:last]
            self._instances[first + 1 : last + 1] = self._instances[first:last]
            self._hashes[first], self._instances[first] = hash(key), instance_id

    def find(self, keys: Sequence[bytes], alive: Iterable[str]) -> str | None:
        """The instance of the first key that one of `alive` had; None where nothing is known."""
        known = set(alive)
        places = (place for key in keys if (place := self._look_up(key)[1]) is not None)
        return next((self._instances[place] for place in places if self._instances[place] in known), None)

    def __len__(self) -> int:
        return sum(map(bool, self._instances))

    def _look_up(self, key: bytes) -> tuple[int, int | None]:
        """The first of a key's places, where the one that was used last is, and its own place if it is in the table."""
        wanted = hash(key)
        first = wanted % self._num_sets * self._num_ways
        places = self._hashes[first : first + self._num_ways]
        return first, first + places.index(wanted) if wanted in places else None
