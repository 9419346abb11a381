"""The decoder's scheduler: which tokens of which requests run in the next step.

Running requests first, then waiting ones, first come first served, under one token budget. Prefill and decode are the
same thing here: a request wants the tokens between `num_computed_tokens` and what can be computed now, in chunks
(Sarathi-Serve, Agrawal et al., 2024). A prompt stops at its first missing input and goes on when that has come.
When blocks run out, the youngest running request gives up its own and is recomputed later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.cache.block_manager import BlockManager
from engine.request import InputState, Request
from engine.scheduler.intake import InputIntake


@dataclass
class ScheduledStep:
    """The batch of one step. `num_tokens[i]` tokens of `requests[i]`; requests with one token come first.

    `admitted` are the requests that begin (again) in this step: an encoder-decoder model projects their cross K/V.
    """

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        return sum(1 for count in self.num_tokens if count == 1)


class DecoderScheduler:
    """Queues of one engine. `waiting` is in order of arrival; `running` requests hold blocks and a slot."""

    def __init__(self, blocks: BlockManager, intake: InputIntake, max_num_seqs: int, token_budget: int) -> None:
        self.blocks = blocks
        self.intake = intake
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []  # since the last look: the engine takes their slots back
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """The request has ended: free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.blocks.free(request.request_id)

    def has_work(self) -> bool:
        """True if some request could compute something now."""
        if any(request.num_computable_tokens > request.num_computed_tokens for request in self.running):
            return True
        for request in self.waiting:  # the same order and the same end as in _admit: else the engine would spin
            if self._can_admit(request):
                return True
            if request.num_computable_tokens > 0 and request.next_missing_input is None:
                return False
        return False

    def schedule(self) -> ScheduledStep:
        """The next step; empty where nothing can run. Blocks for it are allocated."""
        chosen: dict[str, tuple[Request, int]] = {}
        budget = self.token_budget
        preemptions = self.num_preemptions
        for request in sorted(self.running, key=lambda request: request.arrival):
            wanted = min(request.num_computable_tokens - request.num_computed_tokens, budget)
            if wanted <= 0 or request not in self.running:
                continue
            if self._make_room(request, wanted, chosen):
                chosen[request.request_id] = (request, wanted)
                self.blocks.append(request.request_id, request.num_computed_tokens + wanted)
            budget = self.token_budget - sum(count for _, count in chosen.values())
        admitted = self._admit(chosen, budget) if self.num_preemptions == preemptions else []
        batch = sorted(chosen.values(), key=lambda pair: pair[1] != 1)
        return ScheduledStep([r for r, _ in batch], [n for _, n in batch], admitted)

    def _make_room(self, request: Request, wanted: int, chosen: dict[str, tuple[Request, int]]) -> bool:
        """Preempt the youngest until the request's next tokens have blocks; False where it had to give up itself."""
        while not self.blocks.can_append(request.request_id, request.num_computed_tokens + wanted):
            victim = max(self.running, key=lambda candidate: candidate.arrival)
            chosen.pop(victim.request_id, None)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, chosen: dict[str, tuple[Request, int]], budget: int) -> list[Request]:
        """Waiting requests that begin now. One whose inputs are all here goes before those that wait for theirs."""
        admitted = []
        for request in list(self.waiting):
            if budget <= 0:
                break
            wanted = min(request.num_computable_tokens, budget)
            if wanted <= 0:
                continue  # waits for an input; others may go ahead
            if not self._find_place(request, wanted):
                if request.next_missing_input is None:
                    break  # nobody younger may take what it needs
                continue
            self.blocks.allocate(request.request_id, wanted, request.num_encoder_tokens, request.encoder_content)
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append(request)
            chosen[request.request_id] = (request, wanted)
            budget -= wanted
        return admitted

    def _find_place(self, request: Request, wanted: int) -> bool:
        """A slot and blocks for a waiting request; running ones that only wait for an input make way for it.

        They do so only where that is enough: giving way for nothing, again and again, would look like progress.
        """
        if not self._could_place(request, wanted):
            return False
        while not self._has_place(request, wanted):
            self.preempt(max(self._stalled(), key=lambda candidate: candidate.arrival))
        return True

    def _has_place(self, request: Request, wanted: int) -> bool:
        return len(self.running) < self.max_num_seqs and self.blocks.can_allocate(
            wanted, request.num_encoder_tokens, request.encoder_content
        )

    def _could_place(self, request: Request, wanted: int) -> bool:
        """Whether there is a place, or would be one without the stalled requests."""
        if self._has_place(request, wanted):
            return True
        if request.next_missing_input is not None:
            return False
        stalled = self._stalled()
        held = sum(self.blocks.releasable_blocks(other.request_id) for other in stalled)
        needed = self.blocks.missing_blocks(wanted, request.num_encoder_tokens, request.encoder_content)
        return len(self.running) - len(stalled) < self.max_num_seqs and needed <= self.blocks.num_free + held

    def _stalled(self) -> list[Request]:
        """Running requests that wait for their first input: they lose little by giving way."""
        return [
            request
            for request in self.running
            if request.num_computable_tokens <= request.num_computed_tokens
            and not any(item.state is InputState.CONSUMED for item in request.inputs)
        ]

    def _can_admit(self, request: Request) -> bool:
        wanted = min(request.num_computable_tokens, self.token_budget)
        return wanted > 0 and self._could_place(request, wanted)

    def preempt(self, request: Request) -> None:
        """Take the blocks of a running request; it waits, first in line, and is computed again from its tokens."""
        self.running.remove(request)
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.intake.rewind(request)
        self.preempted.append(request)
        position = next(
            (i for i, other in enumerate(self.waiting) if other.arrival > request.arrival), len(self.waiting)
        )
        self.waiting.insert(position, request)

    def yield_blocks(self) -> bool:
        """Nothing can run: let the youngest running request give its blocks to an older one that could compute.

        Returns False where there is no such pair.
        """
        ready = [request.arrival for request in self.waiting if request.num_computable_tokens > 0]
        youngest = max(self.running, key=lambda request: request.arrival, default=None)
        if not ready or youngest is None or youngest.arrival < min(ready):
            return False
        self.preempt(youngest)
        return True
