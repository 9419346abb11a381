"""Encoder outputs kept by an encoder worker for later requests, by content hash.

    capacity_bytes = free + lent (on their way to somebody) + kept (least recently used goes first)

A second instance that needs the same picture, or the same instance once its own cache has given it up, gets the output
that is here: it costs neither preprocessing nor computing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace

import torch

from engine.processors import ProcessedInput


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

    def lend(self, content_hash: str) -> KeptOutput | None:
        """Return the output of this content, or None. Every loan must be returned by `give_back`."""
        kept = self._entries.get(content_hash)
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        self._lent[content_hash] += 1
        self._entries.move_to_end(content_hash)
        return kept

    def give_back(self, content_hash: str) -> None:
        """Return a loan."""
        self._lent[content_hash] -= 1
        if not self._lent[content_hash]:
            del self._lent[content_hash]

    def put(self, content_hash: str, item: ProcessedInput, tensor: torch.Tensor) -> None:
        """Keep an output if eviction can make room. `tensor` must own its memory."""
        if content_hash in self._entries or not self._make_room(tensor.nbytes):
            return
        self._entries[content_hash] = KeptOutput(replace(item, arrays={}), tensor)
        self.used_bytes += tensor.nbytes

    def _make_room(self, size_bytes: int) -> bool:
        """Evict outputs if that frees enough memory; return whether there is enough now."""
        lent_bytes = sum(self._entries[content_hash].tensor.nbytes for content_hash in self._lent)
        if size_bytes > self.capacity_bytes - lent_bytes:
            return False
        for content_hash in [content_hash for content_hash in self._entries if content_hash not in self._lent]:
            if self.used_bytes + size_bytes <= self.capacity_bytes:
                break
            self.used_bytes -= self._entries.pop(content_hash).tensor.nbytes
            self.evictions += 1
        return True


def in_memory_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the values out of a batch: a kept row must not keep its neighbours in memory."""
    whole = tensor.detach().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
