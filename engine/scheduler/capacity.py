"""Cache and memory for another request: tokens and cross tables found in the KV cache, blocks and slots still missing.

An input within the cached prefix, or with cross KV in the cache, need not be encoded, sent or held. That is true only
until the blocks are given up for another request, so nothing here is remembered between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from common.errors import ErrorInfo
from engine.cache.block_manager import BlockManager
from engine.state.prefix import extend_hashes
from engine.state.request import InputState, Request, RequestInput, Sequence


@dataclass(eq=False)
class Capacity:
    """Reads the `running` and `reserved` requests of a scheduler, the holders of blocks and slots: its own lists."""

    blocks: BlockManager
    cache_lookup: CacheLookup
    running: list[Request]
    reserved: list[Request]
    max_num_seqs: int
    max_model_len: int
    max_loras: int

    def never_fits(self, request: Request) -> ErrorInfo | None:
        """Return why a request, as far as the prompt is known, can never run here; None if the request can."""
        length = max((one.num_known_tokens for one in request.sequences), default=len(request.prompt))
        blocks = self.blocks
        if length >= self.max_model_len:
            return ErrorInfo("context_length_exceeded", too_long(length, self.max_model_len), "messages")
        least = len(request.prompt) + 1  # of a sequence before a further token; resumed ones have output already
        lengths = [least] * request.sampling.num_sequences
        if request.resumed:
            lengths = [max(least, len(sequence.token_ids)) for sequence in request.sequences]
        if blocks.fits_ever(len(request.prompt), lengths, request.num_encoder_tokens):
            return None
        message = (
            f"the request needs KV cache for {length + 1 + request.num_encoder_tokens} tokens, the whole pool holds "
            f"{blocks.pool.num_usable * blocks.block_size}: shorten it, or serve with a larger --kv-cache-bytes"
        )
        return ErrorInfo("context_length_exceeded", message, "messages")

    def holds_the_line(self, request: Request) -> bool:
        """Return True for a request that lacks only memory."""
        if request.awaits_kv or self.blocks.is_swapped(request.request_id):
            return True
        return all(item.usable or self.cache_lookup.covers(request, item) for item in request.inputs)

    def has_place(self, request: Request, wanted: int, givers: ListOf[Request] = ()) -> bool:
        """Return True if slots, blocks and an adapter's place are free for a waiting request and the next `wanted`
        tokens, or would be without the `givers`."""
        holders = [other for other in (*self.running, *self.reserved) if other not in givers]
        if request.sampling.adapter and len(adapters_of([*holders, request])) > self.max_loras:
            return False
        slots = sum(other.num_slots for other in holders) + request.num_slots
        if slots > self.max_num_seqs:
            return False
        released: AbstractSet[int] = frozenset()
        if givers:
            names = {other.request_id for other in givers}
            released = self.blocks.releasable_blocks(names, (one for other in givers for one in other.sequence_ids))
        missing = max(self._missing_blocks(request, wanted, released), request.least_free_blocks)
        return missing <= self.blocks.num_free + len(released)

    def _missing_blocks(self, request: Request, wanted: int, released: AbstractSet[int]) -> int:
        if self.blocks.is_swapped(request.request_id):
            return self._missing_to_go_on(request, wanted, released)
        prefix = self.cache_lookup.prefix(request)
        num_tokens = len(prefix) * self.blocks.block_size + wanted
        left = (len(one.token_ids) - self.cache_lookup.num_shared_tokens(one) for one in request.sequences[1:])
        return sum(map(self.blocks.blocks_for, left)) + self.blocks.missing_blocks(
            num_tokens, request.num_encoder_tokens, request.encoder_content, prefix, released
        )

    def _missing_to_go_on(self, request: Request, wanted: int, released: AbstractSet[int]) -> int:
        """Blocks for the swapped tokens of a request and the next step, a copy on write included.

        The whole pool is always enough, since what outgrows it has ended.
        """
        blocks, missing = self.blocks, self.blocks.missing_to_swap_in(request.request_id, released)
        for sequence in request.sequences:
            computed, count = sequence.num_computed_tokens, min(wanted, request.num_remaining(sequence))
            missing += blocks.blocks_for(computed + count) - blocks.blocks_for(computed) + 1
        return min(missing, blocks.pool.num_usable)

    def could_place(self, request: Request, wanted: int) -> bool:
        """Return True if slots and blocks are free, or would be after the `givers` had made way."""
        if self.has_place(request, wanted):
            return True
        return self.holds_the_line(request) and self.has_place(request, wanted, self.givers(request))

    def givers(self, request: Request) -> list[Request]:
        """Running requests that make way: of a lower priority, or waiting for the first input (with little to lose)."""
        return [
            other
            for other in self.running
            if other.priority > request.priority
            or (
                other.next_missing_input is not None
                and all(other.num_remaining(sequence) <= 0 for sequence in other.sequences)
                and not any(item.state is InputState.CONSUMED for item in other.inputs)
            )
        ]

    def would_make_way(self, request: Request) -> bool:
        """Return True if a waiting request would soon be a giver again, stopped in front of the first input."""
        if not request.inputs:
            return False
        first = request.inputs[0]
        return not first.usable and not self.cache_lookup.covers(request, first)


def adapters_of(requests: Iterable[Request]) -> dict[str, None]:
    """Return the distinct adapters of requests, in order."""
    return dict.fromkeys(one.sampling.adapter for one in requests if one.sampling.adapter)


def too_long(num_tokens: int, max_model_len: int) -> str:
    """Return the message about a prompt that leaves no token to generate."""
    return (
        f"the prompt has {num_tokens} tokens (media included), the context length is {max_model_len} and at "
        "least one token has to be generated: shorten the prompt or send smaller or fewer media"
    )


class CacheLookup:
    """Looks requests up in the caches of `blocks`. With `enabled` False, no prefix is ever found."""

    def __init__(self, blocks: BlockManager, *, enabled: bool) -> None:
        self._blocks = blocks
        self._enabled = enabled

    def prefix(self, request: Request) -> list[bytes]:
        """Return hashes of the cached leading blocks of the first sequence. At least one token is left to compute."""
        if not self._enabled or request.sampling.prompt_logprobs is not None:  # every prompt token's logits are wanted
            return []
        if request.cross_attention and not request.inputs_are_known:
            return []
        hashes = extend_hashes(request, request.sequences[0], request.num_reusable_tokens, self._blocks.block_size)
        return hashes[: self._blocks.match_prefix(hashes)]

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence without a table takes over from a sibling: those of the prompt's full
        blocks. At least one token is left to compute."""
        size = self._blocks.block_size
        return max(0, min(len(sequence.request.prompt), len(sequence.token_ids) - 1)) // size * size

    def has_begun(self, request: Request) -> bool:
        """Return True if some sequence has blocks."""
        return any(one.sequence_id in self._blocks.tables for one in request.sequences)

    def num_passed_tokens(self, request: Request) -> int:
        """Return how many tokens no sequence of a request is left to compute. Those without a table take theirs over
        where a sibling has one."""
        if len(request.sequences) == 1:
            return request.sequences[0].num_computed_tokens
        tables, has_begun = self._blocks.tables, self.has_begun(request)
        return min(
            self.num_shared_tokens(one) if has_begun and one.sequence_id not in tables else one.num_computed_tokens
            for one in request.sequences
        )

    def covers_cross(self, request: Request) -> bool:
        return request.cross_attention and request.inputs_are_known and self._blocks.has_cross(request.encoder_content)

    def covers(self, request: Request, item: RequestInput) -> bool:
        """Return True if a waiting request could begin now without this input."""
        first = request.sequences[0].sequence_id
        if first in self._blocks.tables or self._blocks.is_swapped(request.request_id):
            return False
        if request.cross_attention:
            return self.covers_cross(request)
        return item.end is not None and item.end <= len(self.prefix(request)) * self._blocks.block_size

    def remember(self, request: Request) -> None:
        """Enter full blocks of known tokens into the prefix cache."""
        if not self._enabled:
            return
        size = self._blocks.block_size
        for sequence in request.sequences:
            first = sequence.num_remembered
            if sequence.num_computed_tokens // size > first and sequence.sequence_id in self._blocks.tables:
                num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
                hashes = extend_hashes(request, sequence, num_tokens, size)
                self._blocks.remember(sequence.sequence_id, first, hashes[first:])
                sequence.num_remembered = len(hashes)
