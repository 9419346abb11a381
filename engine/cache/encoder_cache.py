"""Caches of encoder outputs by content hash: before use at a receiver, and kept for later requests at an encoder.

    receiver   capacity_bytes = free + reserved (promised, not here yet) + ready (referenced or kept for the next one)
    encoder    capacity_bytes = free + lent (on their way to a receiver) + kept

The least recently used output goes first. At a receiver the same image in ten requests is held once; a reference is
(request id, input id). At an encoder a kept output costs neither preprocessing nor computing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from engine.cache.block_pool import IntegrityError
from engine.processors import ProcessedInput

Reference: TypeAlias = tuple[str, int]


@dataclass
class _CacheEntry:
    size_bytes: int
    tensor: torch.Tensor | None = None
    references: set[Reference] = field(default_factory=set)


class EncoderCacheManager:
    """A byte budget with reserve, commit, acquire and release. Eviction is internal."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.counters = {"encoder_cache_evictions": 0, "encoder_cache_hits": 0}
        self._entries: dict[str, _CacheEntry] = {}
        self._unreferenced: OrderedDict[str, None] = OrderedDict()  # content hashes, least recently used first
        self._unreferenced_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def num_references(self) -> int:
        return sum(len(entry.references) for entry in self._entries.values())

    def is_ready(self, content_hash: str) -> bool:
        entry = self._entries.get(content_hash)
        return entry is not None and entry.tensor is not None

    def is_reserved(self, content_hash: str) -> bool:
        """Return whether memory is reserved for content still under way."""
        entry = self._entries.get(content_hash)
        return entry is not None and entry.tensor is None

    def can_reserve(self, size_bytes: int) -> bool:
        return size_bytes <= self.free_bytes + self._unreferenced_bytes

    def reserve(self, content_hash: str, size_bytes: int, reference: Reference) -> None:
        """Reserve memory for new content, evicting unreferenced content. Ask `can_reserve` first."""
        if content_hash in self._entries:
            raise IntegrityError(f"content {content_hash} is in the cache already")
        while self.free_bytes < size_bytes and self._unreferenced:
            oldest, _ = self._unreferenced.popitem(last=False)
            self._unreferenced_bytes -= self._entries[oldest].size_bytes
            self._remove(oldest)
            self.counters["encoder_cache_evictions"] += 1
        if self.free_bytes < size_bytes:
            raise ValueError(f"{size_bytes} bytes asked for, {self.free_bytes} free of {self.capacity_bytes}")
        self._entries[content_hash] = _CacheEntry(size_bytes, references={reference})
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def commit(self, content_hash: str, tensor: torch.Tensor) -> None:
        """Fill a reservation."""
        entry = self._entries[content_hash]
        if entry.tensor is not None:
            raise IntegrityError(f"content {content_hash} is committed twice")
        entry.tensor = tensor

    def acquire(self, content_hash: str, reference: Reference) -> None:
        """Add a reference to stored content."""
        entry = self._entries[content_hash]
        if not entry.references:
            del self._unreferenced[content_hash]
            self._unreferenced_bytes -= entry.size_bytes
        entry.references.add(reference)
        self.counters["encoder_cache_hits"] += 1

    def get(self, content_hash: str) -> torch.Tensor:
        """Return the encoder output, [num_encoder_tokens, hidden_size]. Raises KeyError if the content is not stored
        yet."""
        tensor = self._entries[content_hash].tensor
        if tensor is None:
            raise KeyError(content_hash)
        return tensor

    def release(self, content_hash: str, reference: Reference) -> None:
        """Remove a reference. A reservation without references is freed at once."""
        entry = self._entries.get(content_hash)
        if entry is None or reference not in entry.references:
            raise IntegrityError(f"{reference} does not refer to content {content_hash}")
        entry.references.remove(reference)
        if entry.references:
            return
        if entry.tensor is None:
            self._remove(content_hash)
        else:
            self._unreferenced[content_hash] = None
            self._unreferenced_bytes += entry.size_bytes

    def _remove(self, content_hash: str) -> None:
        self.used_bytes -= self._entries.pop(content_hash).size_bytes

    def check_integrity(self) -> None:
        """Raise IntegrityError unless sizes add up to the budget and references to the entries."""
        total = sum(entry.size_bytes for entry in self._entries.values())
        if total != self.used_bytes or not 0 <= self.used_bytes <= self.capacity_bytes:
            raise IntegrityError(
                f"entries hold {total} bytes, {self.used_bytes} counted, {self.capacity_bytes} allowed"
            )
        for content_hash, entry in self._entries.items():
            if bool(entry.references) == (content_hash in self._unreferenced):
                raise IntegrityError(f"content {content_hash}: {len(entry.references)} references but listed wrongly")
            if entry.tensor is None and not entry.references:
                raise IntegrityError(f"content {content_hash} is reserved for nobody")


@dataclass(frozen=True)
class KeptOutput:
    """An output [num_encoder_tokens, hidden_size] in memory of its own; `item` describes the source without its arrays,
    as needed for an offer."""

    item: ProcessedInput
    tensor: torch.Tensor


class OutputCache:
    """A byte budget, never exceeded: an output without room beside the lent outputs is not kept."""

    def __init__(self, capacity_bytes: int) -> None:
        """Take the budget in bytes; 0 keeps no output."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = self.misses = self.evictions = 0
        self._entries: OrderedDict[str, KeptOutput] = OrderedDict()  # least recently used first
        self._lent: Counter[str] = Counter()

    def acquire(self, content_hash: str) -> KeptOutput | None:
        """Return the output of this content, or None. Every loan ends by `release`."""
        kept = self._entries.get(content_hash)
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        self._lent[content_hash] += 1
        self._entries.move_to_end(content_hash)
        return kept

    def release(self, content_hash: str) -> None:
        """Return a loan."""
        self._lent[content_hash] -= 1
        if not self._lent[content_hash]:
            del self._lent[content_hash]

    def put(self, content_hash: str, item: ProcessedInput, tensor: torch.Tensor) -> None:
        """Keep an output if eviction can make room. `tensor` must own its memory."""
        lent_bytes = sum(self._entries[name].tensor.nbytes for name in self._lent)
        if content_hash in self._entries or tensor.nbytes > self.capacity_bytes - lent_bytes:
            return
        for name in [name for name in self._entries if name not in self._lent]:
            if self.used_bytes + tensor.nbytes <= self.capacity_bytes:
                break
            self.used_bytes -= self._entries.pop(name).tensor.nbytes
            self.evictions += 1
        self._entries[content_hash] = KeptOutput(replace(item, arrays={}), tensor)
        self.used_bytes += tensor.nbytes


def in_memory_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the values out of a batch: a kept row must not keep its neighbours in memory."""
    whole = tensor.detach().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
