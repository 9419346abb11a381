"""The decoder's scheduler: chooses the tokens of the next step.

Requests that want their next token first, then prompts: those of running requests, then of waiting ones, by priority
and arrival, under one token budget and within the pace (see pace). Beside prompts of text, those that have waited for
an encoder share what text leaves of the pace, and a quarter at least: encoding takes longer than a prompt, so their
clients wait little longer, and text need not wait for images. A sequence wants the tokens between
`num_computed_tokens` and what can be computed now, in chunks (Sarathi-Serve, Agrawal et al., 2024). A prompt stops at
its first missing input and goes on when that has come.
When blocks run out, the request that comes last gives up its own: they move to the host (swap), or are computed
again later (recompute).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Final

from common.config import EngineConfig
from engine.cache.block_manager import BlockManager
from engine.scheduler.capacity import CacheLookup, Capacity
from engine.scheduler.pace import PrefillPace
from engine.state.inputs import InputBuffers, ScheduledStep
from engine.state.request import InputState, Request, Sequence

ENCODED_SHARE: Final = 0.25
"""Part of the pace for prompts that have waited for an encoder, beside however many prompts of text."""


class Chosen:
    """Tokens chosen for the step, by request id, and their sums: each request of hundreds asks for these."""

    def __init__(self) -> None:
        self.pairs: dict[str, list[tuple[Sequence, int]]] = {}
        self.num_tokens = self.num_decodes = self.num_yielding = 0

    def add(self, request: Request, sequence: Sequence, count: int) -> None:
        self.pairs.setdefault(request.request_id, []).append((sequence, count))
        self.num_tokens += count
        self.num_decodes += count == 1
        self.num_yielding += count if request.yields_to_text else 0

    def remove(self, request: Request) -> None:
        for _, count in self.pairs.pop(request.request_id, ()):
            self.num_tokens -= count
            self.num_decodes -= count == 1
            self.num_yielding -= count if request.yields_to_text else 0


class DecoderScheduler:
    """Queues of one engine. `waiting` is in order; `running` and `reserved` requests hold blocks and slots. The KV of
    `reserved` requests is on the way. `line_end` waits for a reservation: no waiting request behind it may begin.

    A request with tokens that are not known yet is not preempted: where one would have to be, `held_back` is set, and
    the loop waits for the tokens in flight, resets it and schedules again.

    Scheduling changes the state of inputs: cached KV makes some unnecessary (CONSUMED), and lost KV makes some needed
    again (DORMANT). `pop_changed` returns their requests, for the receiver of inputs to act on.
    """

    def __init__(
        self,
        blocks: BlockManager,
        cache_lookup: CacheLookup,
        slots: InputBuffers,
        config: EngineConfig,
        max_model_len: int,
        *,
        whole_inputs: bool = False,
    ) -> None:
        """With `whole_inputs` the tokens of an input are computed in one step."""
        objective_ms = config.itl_objective_ms
        self.blocks = blocks
        self.cache_lookup = cache_lookup
        self._slots = slots
        self.token_budget = config.max_num_batched_tokens
        self.preemption = config.preemption
        self._whole_inputs = whole_inputs
        self.pace = None if objective_ms == 0 else PrefillPace(None if objective_ms is None else objective_ms / 1e3)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.reserved: list[Request] = []
        self.line_end: Request | None = None
        self.held_back = False
        self._first: Request | None = None  # for whom others have just given their blocks
        self._changed: list[Request] = []
        self._ready: tuple[int, Counter[int]] | None = None  # prompt tokens of this step: all, and text by priority
        limits = config.max_num_seqs, max_model_len, config.max_loras
        self.capacity = Capacity(blocks, cache_lookup, self.running, self.reserved, *limits)
        self.counters = {"preemptions": 0, "preemptions_by_swap": 0, "inputs_covered": 0}
        self.counters |= {"prefix_queried_tokens": 0, "prefix_hit_tokens": 0}

    def add(self, request: Request) -> None:
        """Insert a request into `waiting`, by order."""
        if not self.waiting or self.waiting[-1].order < request.order:  # as usual; a batch may have thousands
            self.waiting.append(request)
            return
        position = next((i for i, other in enumerate(self.waiting) if other.order > request.order), len(self.waiting))
        self.waiting.insert(position, request)

    def reorder(self, request: Request) -> None:
        """The order of a request has changed."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.add(request)

    def pop_changed(self) -> list[Request]:
        """Return the requests with inputs that became CONSUMED or DORMANT since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def remove(self, request: Request) -> None:
        """Remove an ended request, and free all blocks and slots."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.reserved:
            self.reserved.remove(request)
        self._changed = [other for other in self._changed if other is not request]
        self._slots.release_slots(request.sequences)
        self._free_tables(request)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of an ended sequence. With the only table on the host, siblings begin anew."""
        request_id = sequence.request.request_id
        was_swapped = self.blocks.is_swapped(request_id)
        self.blocks.free(sequence.sequence_id)
        self._slots.release_slots([sequence])
        if was_swapped and not self.blocks.is_swapped(request_id):
            self._rewind_inputs(sequence.request)

    def has_work(self) -> bool:
        """Return True if some request could compute now."""
        if any(self._wanted(request, self.token_budget, self.token_budget) for request in self.running):
            return True
        for request in self.waiting:  # the same order and the same end as in _admit: else the engine would spin
            if self._is_behind_the_line(request):
                return False
            wanted = self._first_chunk(request, self.token_budget)
            if wanted > 0 and self.capacity.could_place(request, wanted):
                return True
            if wanted > 0 and self.capacity.holds_the_line(request):
                return False
        return False

    def schedule(self) -> ScheduledStep:
        """Return the next step, with blocks allocated; empty if no request can run."""
        chosen = Chosen()
        self._ready = None
        preemptions = self.counters["preemptions"]
        for request in sorted(self.running, key=lambda request: (request.is_prefilling, request.order)):
            if self.held_back:
                break  # nobody who comes later may take what it needs
            if self.counters["preemptions"] == preemptions or request in self.running:
                self._continue(request, chosen, self._budget(request, chosen))
        settled = self.counters["preemptions"] == preemptions and not self.held_back
        admitted = self._admit(chosen) if settled else []
        batch = sorted((pair for pairs in chosen.pairs.values() for pair in pairs), key=lambda pair: pair[1] != 1)
        return ScheduledStep([s for s, _ in batch], [n for _, n in batch], admitted)

    def _budget(self, request: Request, chosen: Chosen) -> int:
        """Return the tokens that a request may take beside the chosen tokens: a prompt no more than the pace allows."""
        left, num_decodes = self.token_budget - chosen.num_tokens, chosen.num_decodes
        if self.pace is None or not num_decodes or request.prefill_only or not request.is_prefilling:
            return left
        if self._ready is None:
            self._ready = self._count_ready_tokens()
        num_ready, text = self._ready
        limit = self.pace.limit(num_decodes, request.sequences[0].num_computed_tokens, num_ready)
        if limit is None:
            return left
        left = min(left, limit - (chosen.num_tokens - num_decodes))
        if not request.yields_to_text:
            return left
        before = sum(count for priority, count in text.items() if priority <= request.priority)
        return min(left, max(limit - before, int(ENCODED_SHARE * limit)) - chosen.num_yielding)

    def _count_ready_tokens(self) -> tuple[int, Counter[int]]:
        """Return the prompt tokens that could be computed now, of running and first waiting requests, and those of text
        by priority, without waiting requests that find no place."""
        begun = [(one, one.num_remaining(one.sequences[0])) for one in self.running if one.is_prefilling]
        first = itertools.islice(self.waiting, 32)
        waiting = [(one, self._first_chunk(one, len(one.sequences[0].token_ids))) for one in first]
        text = Counter[int]()
        for one, count in (*begun, *itertools.takewhile(lambda pair: self.capacity.has_place(*pair), waiting)):
            text[one.priority] += 0 if one.yields_to_text else count
        return sum(count for _, count in begun + waiting), text

    # --- running requests

    def _continue(self, request: Request, chosen: Chosen, budget: int) -> None:
        """Choose the next tokens of a running request; preempt the last requests if blocks are missing."""
        for sequence, count in self._wanted(request, budget, self.token_budget - chosen.num_tokens):
            if sequence.sequence_id not in self.blocks.tables:
                self._begin_sibling(request, sequence)
                continue  # how much is left to compute has just changed: it runs in the next step
            end = sequence.num_computed_tokens + count
            while not self.blocks.can_append(sequence.sequence_id, sequence.num_computed_tokens, end):
                victim = max(self.running, key=lambda candidate: candidate.order)
                if victim.has_unknown_tokens:
                    self.held_back = True
                    chosen.remove(request)  # all of its sequences wait, or none
                    return
                chosen.remove(victim)
                # Alone in the pool, its sequences share less than they could. Swapped, they would share no more.
                self.preempt(victim, recompute=len(self.running) == 1 and not self.reserved)
                if victim is request:
                    request.least_free_blocks = min(self.blocks.num_free + 1, self.blocks.pool.num_usable)
                    return
            self.blocks.append(sequence.sequence_id, sequence.num_computed_tokens, end)
            chosen.add(request, sequence, count)

    def _wanted(self, request: Request, budget: int, room: int) -> list[tuple[Sequence, int]]:
        """Return the runnable tokens of each sequence within the budget. Beams take the last step together.

        Whole inputs may exceed the budget, which is what the pace allows, up to the room.
        """
        remaining = [(sequence, request.num_remaining(sequence)) for sequence in request.sequences]
        if request.sampling.uses_beams and request.forked:
            if all(count == 1 for _, count in remaining):
                return remaining if len(remaining) <= budget else []
            remaining = [
                (one, min(count, len(one.token_ids) - 1 - one.num_computed_tokens)) for one, count in remaining
            ]
        wanted = []
        for sequence, count in remaining:
            if sequence.sequence_id not in self.blocks.tables and self._awaits_sibling(request, sequence):
                continue
            count = min(count, budget)
            if self._whole_inputs and count > 0:
                count = request.whole_inputs(sequence, count, room)
            if count > 0:
                wanted.append((sequence, count))
                budget, room = budget - count, room - count
        return wanted

    def _awaits_sibling(self, request: Request, sequence: Sequence) -> bool:
        """Return True for a sequence without blocks until a sibling with blocks has computed what both share."""
        return self.cache_lookup.has_begun(request) and self._parent(request, sequence) is None

    def _parent(self, request: Request, sequence: Sequence) -> Sequence | None:
        """Return a sibling with blocks for all tokens that both share."""
        least, tables = self.cache_lookup.num_shared_tokens(sequence), self.blocks.tables
        holders = (one for one in request.sequences if one.sequence_id in tables)
        return next((one for one in holders if one.num_computed_tokens >= least), None)

    def _begin_sibling(self, request: Request, sequence: Sequence) -> None:
        """Give a table to a sequence without blocks: share the prompt's full blocks with a sibling that has them."""
        parent = self._parent(request, sequence)
        if parent is not None:
            sequence.num_computed_tokens = self.cache_lookup.num_shared_tokens(sequence)
            shared = sequence.num_computed_tokens // self.blocks.block_size
            self.blocks.fork(parent.sequence_id, sequence.sequence_id, shared)
            sequence.num_remembered = min(parent.num_remembered, shared)
        elif not self.cache_lookup.has_begun(request):
            # The sibling that had the prompt has ended: this one computes it, with the inputs it needs again.
            if not request.cross_attention:
                self._rewind_inputs(request)
            self._begin(request, 0)

    # --- waiting requests

    def _admit(self, chosen: Chosen) -> list[Request]:
        """Start waiting requests. A request with complete inputs goes before requests with missing inputs."""
        admitted = []
        line, first = list(self.waiting), self._first
        self._first, only_text = None, False
        for request in sorted(line, key=lambda one: one is not first) if first is not None else line:
            if self.held_back or self._is_behind_the_line(request):
                break
            if only_text and request.yields_to_text:
                continue
            wanted = self._first_chunk(request, self.token_budget)
            if wanted <= 0:
                continue  # waits for an input; others may go ahead
            budget = self._budget(request, chosen)
            if budget <= 0:
                if not request.yields_to_text:
                    break
                only_text = True
                continue
            wanted = min(wanted, budget)
            if not self._find_place(request, wanted, chosen):
                if self.capacity.holds_the_line(request):
                    break  # nobody who comes later may take what it needs
                continue
            self.waiting.remove(request)
            self.running.append(request)
            if self.blocks.is_swapped(request.request_id):
                self.blocks.swap_in(request.request_id)
            else:
                self._begin(request, wanted)
            self._continue(request, chosen, budget)
            admitted.append(request)
        return [request for request in admitted if request in self.running]

    def _begin(self, request: Request, wanted: int) -> None:
        """Give the request block tables; mark inputs as consumed that the caches cover."""
        num_cached = self._allocate(request, wanted)
        self.counters["prefix_queried_tokens"] += len(request.sequences[0].token_ids)
        self.counters["prefix_hit_tokens"] += num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        self._cover_inputs(request, num_cached)

    def _cover_inputs(self, request: Request, num_cached: int) -> None:
        """Mark inputs as consumed that the first `num_cached` tokens, or a cross table in the cache, make
        unnecessary."""
        for item in request.inputs:
            end = 0 if request.cross_attention else item.end
            covered = item.offer is not None and end is not None and end <= num_cached
            if covered and not item.usable and item.state is not InputState.GRANTED:
                item.state = InputState.CONSUMED
                self.counters["inputs_covered"] += 1
                self._changed.append(request)

    def _rewind_inputs(self, request: Request) -> None:
        """Mark inputs as needed again whose KV is lost."""
        for item in request.inputs:
            if item.state is InputState.CONSUMED:
                item.state = InputState.DORMANT
                self._changed.append(request)

    def _allocate(self, request: Request, wanted: int) -> int:
        """Give the first sequence a table: the cached prefix, and blocks for the first chunk.

        Returns how many tokens the prefix cache has.
        """
        first, prefix = request.sequences[0], self.cache_lookup.prefix(request)
        if request.num_encoder_tokens and not self.blocks.get_cross_block_table(request.request_id):
            self.blocks.allocate_cross(request.request_id, request.num_encoder_tokens, request.encoder_content)
        num_tokens = len(prefix) * self.blocks.block_size + wanted
        num_cached = self.blocks.allocate(first.sequence_id, num_tokens, prefix)
        first.num_computed_tokens = num_cached
        first.num_remembered = num_cached // self.blocks.block_size
        return num_cached

    def _first_chunk(self, request: Request, budget: int) -> int:
        """Return the tokens of a waiting request's first step; 0 while an input is missing.

        A prefill with nothing left to compute is wanted back from the host as well: somebody waits for what it has.
        """
        if self.blocks.is_swapped(request.request_id):
            wanted = max(min(request.num_remaining(sequence), budget) for sequence in request.sequences)
            return max(wanted, 1) if request.is_prefilled_here else wanted
        first, lookup = request.sequences[0], self.cache_lookup
        num_cached = len(lookup.prefix(request)) * self.blocks.block_size
        computable = request.num_computable_tokens(first, num_cached, cross_covered=lookup.covers_cross(request))
        return max(0, min(computable - num_cached, budget))  # the prefix may end within a missing input

    def _is_behind_the_line(self, request: Request) -> bool:
        return self.line_end is not None and request.order > self.line_end.order

    def _find_place(self, request: Request, wanted: int, chosen: Chosen) -> bool:
        """Find slots and blocks for a waiting request. Requests of a lower priority make way, and running requests that
        only wait for an input.

        They do so only where that is enough: giving way for nothing, again and again, would look like progress.
        """
        if not self.capacity.could_place(request, wanted):
            return False
        while not self.capacity.has_place(request, wanted):
            victim = max(self.capacity.givers(request), key=lambda candidate: candidate.order, default=None)
            if victim is None:
                return False
            if victim.has_unknown_tokens:
                self.held_back = True
                return False
            chosen.remove(victim)
            self.preempt(victim)
        return True

    # --- requests whose keys and values come from elsewhere

    def reserve(self, request: Request) -> bool:
        """Reserve slots and blocks for a request with KV from another engine, and for the next token.

        False where there is no place, or where somebody before it waits for one. What is reserved is not preempted:
        a sender counts on it, and has no need of anything else here to come to its end.
        """
        wanted = self._wanted_by_handoff(request)
        if self._is_held_up(request) or not self._find_place(request, wanted, Chosen()):
            return False
        self._allocate(request, wanted)
        self.reserved.append(request)
        return True

    def release(self, request: Request) -> None:
        """Take a reservation back."""
        self.reserved.remove(request)
        self._free_tables(request)

    def start(self, request: Request) -> None:
        """Run a reserved request whose KV is complete: all sequences share the KV, a partly filled block included. Only
        an input that contains the last prompt token is still needed."""
        self.reserved.remove(request)
        self.running.append(request)
        self.cache_lookup.remember(request)
        first, *siblings = request.sequences
        for sibling in siblings:
            self.blocks.fork(first.sequence_id, sibling.sequence_id)
            sibling.num_computed_tokens, sibling.num_remembered = first.num_computed_tokens, first.num_remembered
        self._cover_inputs(request, request.num_handoff_tokens)

    def _wanted_by_handoff(self, request: Request) -> int:
        """Return the tokens to be received beyond the cached prefix, and the next one."""
        return request.num_handoff_tokens + 1 - len(self.cache_lookup.prefix(request)) * self.blocks.block_size

    def _is_held_up(self, request: Request) -> bool:
        """Return True if an earlier waiting request lacks only memory."""
        earlier = itertools.takewhile(lambda other: other.order < request.order, self.waiting)
        return any(
            self._first_chunk(other, self.token_budget) > 0 and self.capacity.holds_the_line(other) for other in earlier
        )

    # --- preemption

    def preempt(self, request: Request, *, recompute: bool = False) -> None:
        """Take the blocks of a running request, swapped or, always with `recompute`, given up. The request waits, first
        of equal priority, and resumes at the same tokens."""
        self.running.remove(request)
        self._slots.release_slots(request.sequences)
        if not recompute and self._swaps(request):
            self.blocks.swap_out(request.request_id, request.sequence_ids)
            self.counters["preemptions_by_swap"] += 1
        else:
            self._free_tables(request)
            for sequence in request.sequences:
                sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
                sequence.num_computed_tokens = sequence.num_remembered = 0
            self._rewind_inputs(request)
        request.num_preemptions += 1
        request.least_free_blocks = 0
        self.counters["preemptions"] += 1
        self.add(request)

    def _swaps(self, request: Request) -> bool:
        """Swap or recompute: swapping pays where inputs or keys and values would have to come again, or several
        sequences be computed."""
        if self.preemption == "recompute" or not self.blocks.can_swap_out(request.request_id, request.sequence_ids):
            return False
        consumed = any(item.state is InputState.CONSUMED for item in request.inputs)
        return self.preemption == "swap" or consumed or request.prefilled or len(request.sequences) > 1

    def _free_tables(self, request: Request) -> None:
        for sequence in request.sequences:
            self.blocks.free(sequence.sequence_id)
        self.blocks.free_cross(request.request_id)

    def yield_blocks(self) -> bool:
        """Let the last running requests release blocks for an earlier request, when no request can run.

        Only where that is enough for it, and where it would not make way for them again at once: blocks would go to and
        fro for nothing. It comes first in the next step, or others would take them; a reservation comes before any
        step. Returns False where there is no such request.
        """
        for request in self.waiting:
            if self._is_behind_the_line(request):
                break
            wanted = self._first_chunk(request, self.token_budget)
            if wanted <= 0 or self.capacity.would_make_way(request):
                continue
            if self._yield_to(request, wanted):
                self._first = request
                return True
            if self.capacity.holds_the_line(request):
                return False
        offered = self.line_end
        if offered is None or self._is_held_up(offered):
            return False
        return self._yield_to(offered, self._wanted_by_handoff(offered))

    def _yield_to(self, request: Request, wanted: int) -> bool:
        """Preempt later running requests, the last ones first, until there is place; none where all are not enough."""
        later = sorted((one for one in self.running if one.order > request.order), key=lambda one: one.order)
        if not later or not self.capacity.has_place(request, wanted, later):
            return False
        while later and not self.capacity.has_place(request, wanted):
            self.preempt(later.pop())
        return True
