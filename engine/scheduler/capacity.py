"""Room for one request more: what it takes, who has it, and who would make way."""

from __future__ import annotations

from engine.cache.block_manager import BlockManager
from engine.scheduler.cache_lookup import CacheLookup
from engine.state.request import InputState, Request


class Capacity:
    """Looks at the `running` and `reserved` requests of a scheduler, which hold blocks and slots."""

    def __init__(
        self,
        blocks: BlockManager,
        coverage: CacheLookup,
        running: list[Request],
        reserved: list[Request],
        max_num_seqs: int,
    ) -> None:
        """The lists are the scheduler's own: they change under this."""
        self._blocks = blocks
        self._coverage = coverage
        self._running = running
        self._reserved = reserved
        self._max_num_seqs = max_num_seqs

    def holds_the_line(self, request: Request) -> bool:
        """True for a request that has all it needs but room."""
        return request.awaits_kv or self._blocks.is_swapped(request.request_id) or self._coverage.has_all(request)

    def has_place(self, request: Request, wanted: int) -> bool:
        """Whether slots and blocks are free for a waiting request and the next `wanted` tokens of it."""
        slots = sum(other.num_slots for other in (*self._running, *self._reserved)) + request.num_slots
        return slots <= self._max_num_seqs and self._missing_blocks(request, wanted) <= self._blocks.num_free

    def _missing_blocks(self, request: Request, wanted: int) -> int:
        if self._blocks.is_swapped(request.request_id):
            return self._missing_to_go_on(request, wanted)
        prefix = self._coverage.prefix(request)
        num_tokens = len(prefix) * self._blocks.block_size + wanted
        shared = len(request.prompt) // self._blocks.block_size
        siblings = sum(self._blocks.blocks_for(len(one.token_ids)) - shared for one in request.sequences[1:])
        return siblings + self._blocks.missing_blocks(
            num_tokens, request.num_encoder_tokens, request.encoder_content, prefix
        )

    def _missing_to_go_on(self, request: Request, wanted: int) -> int:
        """Blocks for what a swapped request has on the host and for its next step there, a copy on write included.

        The whole pool is always enough, since what outgrows it has ended.
        """
        blocks, missing = self._blocks, self._blocks.missing_to_swap_in(request.request_id)
        for sequence in request.sequences:
            computed, count = sequence.num_computed_tokens, min(wanted, request.num_remaining(sequence))
            missing += blocks.blocks_for(computed + count) - blocks.blocks_for(computed) + 1
        return min(missing, blocks.pool.num_usable)

    def could_place(self, request: Request, wanted: int) -> bool:
        """Whether there is a place, or would be one without those who would make way."""
        if self.has_place(request, wanted):
            return True
        return self.holds_the_line(request) and self.has_place_without(self.givers(request), request, wanted)

    def has_place_without(self, givers: list[Request], request: Request, wanted: int) -> bool:
        """Whether there would be a place if some running requests gave theirs."""
        held = sum(self._blocks.releasable_blocks(other.request_id, other.sequence_ids) for other in givers)
        holders = [other for other in (*self._running, *self._reserved) if other not in givers]
        slots = sum(other.num_slots for other in holders) + request.num_slots
        return slots <= self._max_num_seqs and self._missing_blocks(request, wanted) <= self._blocks.num_free + held

    def givers(self, request: Request) -> list[Request]:
        """Running requests that make way: of a lower priority, or waiting for their first input (they lose little)."""
        return [
            other
            for other in self._running
            if other.priority > request.priority
            or (
                other.next_missing_input is not None
                and all(other.num_remaining(sequence) <= 0 for sequence in other.sequences)
                and not any(item.state is InputState.CONSUMED for item in other.inputs)
            )
        ]

    def would_make_way(self, request: Request) -> bool:
        """Whether a waiting request would be among the givers again once it had what it can compute now: what stands in
        front of its first input."""
        if not request.inputs:
            return False
        first = request.inputs[0]
        return not first.usable and not self._coverage.covers(request, first)
