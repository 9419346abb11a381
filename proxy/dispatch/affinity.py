"""Cache affinity: the instance with a prompt's beginning, or media, probably in the caches.

The keys of a prompt, the longest first, for CHUNK_TOKENS = 64 and an image among tokens 64 to 127:

    tokens   0 ........ 63 | 64 ... image ... 127 | 128 ...
    keys     |--- k1 ----|                                     prompts with equal beginnings share k1, ...
             |----------------- k2 ---------------|            ... and k2 only with the same image
    list     [k2, k1, image]
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from proxy.dispatch.jobs import Job

CHUNK_TOKENS: Final = 64
MAX_CHUNKS: Final = 256
"""Of one prompt; longer prompts are compared by the first 16,384 tokens."""
MAX_KEYS: Final = 20_000
"""Remembered keys: a million tokens, in 0.3 MiB."""
WAYS: Final = 8


def cache_keys(job: Job) -> list[bytes]:
    """Return the cache keys of an instance after this job, the longest prefix first.

    With cross-attention a decoder's blocks depend on the inputs: inputs outside the prompt begin every chain.
    """
    in_prompt = {one.prompt_index: one.content_hash for one in job.slots if one.prompt_index is not None}
    chain = "".join(one.content_hash for one in job.slots if one.prompt_index is None).encode()
    prefixes: list[bytes] = []
    tokens = job.prompt_token_ids
    for start in range(0, min(len(tokens) - CHUNK_TOKENS + 1, MAX_CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS):
        digest = hashlib.blake2b(chain, digest_size=16)
        digest.update(array("q", tokens[start : start + CHUNK_TOKENS]).tobytes())
        for index in sorted(in_prompt.keys() & range(start, start + CHUNK_TOKENS)):
            digest.update(in_prompt[index].encode())
        chain = digest.digest()
        prefixes.append(chain)
    return [*reversed(prefixes), *(one.content_hash.encode() for one in job.slots)]


class AffinityMap:
    """The last instance of each key, in a table of fixed size like a processor's cache.

    A key has WAYS possible slots; of the keys that share those, the least recently used is evicted first.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._num_ways = min(WAYS, max_keys)
        self._num_sets = max_keys // self._num_ways
        size = self._num_sets * self._num_ways
        self._hashes = array("q", bytes(8 * size))
        self._instances = [""] * size  # of the hashes beside; "" without a key

    def remember(self, keys: Iterable[bytes], instance_id: str) -> None:
        """Record the instance as the last one of these keys."""
        for key in keys:
            first, slot = self._look_up(key)
            last = first + self._num_ways - 1 if slot is None else slot
            self._hashes[first + 1 : last + 1] = self._hashes[first:last]
            self._instances[first + 1 : last + 1] = self._instances[first:last]
            self._hashes[first], self._instances[first] = hash(key), instance_id

    def find(self, keys: Sequence[bytes], alive: Iterable[str]) -> str | None:
        """Return the instance in `alive` of the first known key; None without any."""
        known = set(alive)
        slots = (slot for key in keys if (slot := self._look_up(key)[1]) is not None)
        return next((self._instances[slot] for slot in slots if self._instances[slot] in known), None)

    def __len__(self) -> int:
        return sum(map(bool, self._instances))

    def _look_up(self, key: bytes) -> tuple[int, int | None]:
        """Return the first of a key's slots, with the latest key, and the key's own slot if in the table."""
        wanted = hash(key)
        first = wanted % self._num_sets * self._num_ways
        slots = self._hashes[first : first + self._num_ways]
        return first, first + slots.index(wanted) if wanted in slots else None
