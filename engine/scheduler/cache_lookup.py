"""Lookup of waiting requests in the KV cache: cached prefixes of tokens, and cached cross tables.

An input that stands within the cached prefix, or whose cross keys and values are there, need not be encoded, sent or
held. That holds only until the blocks are given up for somebody else, so nothing here is remembered between steps.
"""

from __future__ import annotations

from engine.cache.block_manager import BlockManager
from engine.state.request import Request, RequestInput


class CacheLookup:
    """Looks requests up in the caches of `blocks`. With `enabled` False, no prefix is ever found."""

    def __init__(self, blocks: BlockManager, *, enabled: bool) -> None:
        self._blocks = blocks
        self._enabled = enabled
        self.counters = {"prefix_queried_tokens": 0, "prefix_hit_tokens": 0}

    def prefix(self, request: Request) -> list[bytes]:
        """Return hashes of the cached leading blocks of the first sequence. At least one token is left to compute."""
        if not self._applies_to(request):
            return []
        first = request.sequences[0]
        hashes = request.extend_hashes(first, request.num_reusable_tokens, self._blocks.block_size)
        return hashes[: self._blocks.match_prefix(hashes)]

    def covers_cross(self, request: Request) -> bool:
        return request.cross_attention and request.inputs_are_known and self._blocks.has_cross(request.encoder_content)

    def covers(self, request: Request, item: RequestInput) -> bool:
        """Return True if a waiting request could begin now without this input."""
        first = request.sequences[0].sequence_id
        if self._blocks.has_table(first) or self._blocks.is_swapped(request.request_id):
            return False
        if request.cross_attention:
            return self.covers_cross(request)
        if item.start is None or not self._applies_to(request):
            return False
        return item.start + item.num_prompt_tokens <= len(self.prefix(request)) * self._blocks.block_size

    def has_all(self, request: Request) -> bool:
        """Return True if no needed input of a waiting request is missing."""
        return all(item.usable or self.covers(request, item) for item in request.inputs)

    def count(self, request: Request, num_cached: int) -> None:
        """Count the cached tokens of a request at the start."""
        self.counters["prefix_queried_tokens"] += len(request.sequences[0].token_ids)
        self.counters["prefix_hit_tokens"] += num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached

    def remember(self, request: Request) -> None:
        """Enter full blocks of known tokens into the prefix cache."""
        if not self._enabled:
            return
        size = self._blocks.block_size
        for sequence in request.sequences:
            first = sequence.num_remembered
            if sequence.num_computed_tokens // size > first and self._blocks.has_table(sequence.sequence_id):
                num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
                hashes = request.extend_hashes(sequence, num_tokens, size)
                self._blocks.remember(sequence.sequence_id, first, hashes[first:])
                sequence.num_remembered = len(hashes)

    def _applies_to(self, request: Request) -> bool:
        """Not where every prompt token's logits are wanted, nor before all of the content is known."""
        if not self._enabled or request.sampling.prompt_logprobs is not None:
            return False
        return not request.cross_attention or request.inputs_are_known
