"""A request inside the engine: the known part of its prompt, its inputs, and its sequences of tokens.

The prompt arrives with one placeholder token per input. Placeholders are expanded in order, as soon as the sizes of
the inputs are known; what stands after an input of unknown size is not known yet:

    prompt        t t t P t t P t t            P: placeholder, one per input
    expanded      t t t p p p p t t | P t t    size of input 0 known, size of input 1 not
                                    ^ len(prompt)

One sequence computes the prompt. After that it is forked: into `n` that go their own ways, or into the beams of a beam
search. Each has its own self-attention block table; the cross-attention table belongs to the request.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from torch import Tensor

from common.messages import InputLayout, InputSlot, Offer, Resumed, Span, TokenLogprob
from common.sampling_params import SamplingParams
from common.telemetry import SpanRecorder
from engine.state.cross_ranges import groups_of
from engine.state.spec import IntArray


class InputState(enum.Enum):
    """Progress of a request's input into the prompt."""

    MISSING = "missing"  # nobody has offered it yet
    OFFERED = "offered"  # offered, waiting for room
    GRANTED = "granted"  # room is reserved, the tensor is on its way
    READY = "ready"  # in the encoder cache
    CONSUMED = "consumed"  # prefilled: its values live in the KV cache, the encoder output is released
    DORMANT = "dormant"  # consumed once, KV blocks given up; needed again unless they are still in the cache then


@dataclass(eq=False)
class RequestInput:
    """An input of a request. `start` to `end` (not included) is its place in the expanded prompt; None until known."""

    slot: InputSlot
    state: InputState = InputState.MISSING
    offer: Offer | None = None
    attempt: int = -1
    deadline_s: float = 0.0
    start: int | None = None
    end: int | None = None

    @property
    def usable(self) -> bool:
        return self.state in (InputState.READY, InputState.CONSUMED)


UNKNOWN_TOKEN: Final = -1
"""Stands in `Sequence.token_ids` for a token that the device has chosen, or is about to, and the host does not know."""

_FIRST: Final = 1 << 64
"""More than any two priorities differ by."""

_sequence_ids = itertools.count()


@dataclass(eq=False)
class Sequence:
    """A decoder sequence: the prompt and the generated tokens.

    `index` is its number within the request. `hashes` are those of its full blocks, of which the first `num_remembered`
    are in the prefix cache. Its first `num_lost_tokens` were computed once, before a preemption or, of a request that
    was prefilled, before it moved here. The last of `token_ids` may be UNKNOWN_TOKENs; `is_full`: whatever they are,
    none follows them.
    `sampler_state` are the sampler's notes; None at first and after a fork or a resume. They follow from the other
    fields. Whoever changes tokens that are already there, in place of appending, sets None.
    """

    request: Request
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    slot_index: int = -1
    num_remembered: int = 0
    num_lost_tokens: int = 0
    is_full: bool = False
    hashes: list[bytes] = field(default_factory=list)
    sampler_state: object | None = None
    sequence_id: int = field(default_factory=lambda: next(_sequence_ids))

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def seed(self) -> int:
        """Of this sequence alone: siblings draw differently."""
        return self.request.seed + self.index

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the known prompt."""
        return len(self.request.prompt)

    @property
    def num_known_tokens(self) -> int:
        """Length without trailing tokens known to the device alone."""
        count = len(self.token_ids)
        while count and self.token_ids[count - 1] == UNKNOWN_TOKEN:
            count -= 1
        return count

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt) :]

    def fork(self, index: int) -> Sequence:
        """Make a sequence with the same tokens and computed length, without blocks and slot."""
        return Sequence(
            self.request,
            index,
            list(self.token_ids),
            self.num_computed_tokens,
            num_remembered=self.num_remembered,
            hashes=list(self.hashes),
        )


@dataclass(eq=False)
class Request:
    """A request. Lower `priority` goes first, then lower `arrival`; `instance` names the spans.

    `cross_attention`: the decoder reads the inputs by cross-attention, all of them from its first token on.
    `sequences` are those that still grow. `resumed` sequences had generated some tokens elsewhere. `order` is the sort
    key of scheduling. `mrope_positions` [3, n] are time, height, width of the known prompt (Qwen2-VL, section 2.1).

    Where prefill and decode are apart, the request is at both. `prefill_only`: its keys and values are computed for
    somebody else, who computes the last known token and samples. `prefilled`: it is that somebody; the keys and values
    are still to come while it `awaits_kv`. `attempt` is told with what is told of the request.
    """

    request_id: str
    prompt_token_ids: list[int]
    inputs: list[RequestInput]
    sampling: SamplingParams
    arrival: int
    priority: int = 0
    seed: int = 0
    is_encoder_decoder: bool = False
    cross_attention: bool = False
    uses_mrope: bool = False
    instance: str = "engine"
    resumed: ListOf[Resumed] = ()
    prefill_only: bool = False
    prefilled: bool = False
    attempt: int = 0
    prompt: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    least_free_blocks: int = 0
    """With fewer free blocks the request does not begin again: it ran out of blocks with one less."""
    forked: bool = False
    has_output: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    cross_queries: list[dict[int, Tensor]] = field(default_factory=list)
    """Of the prompt's tokens so far, by layer, for an alignment."""
    mrope_next: int = 0
    mrope_end: int = 0
    is_prompt_known: bool = False

    def __post_init__(self) -> None:
        self.recorder = SpanRecorder(self.instance)
        self.sequences = [Sequence(self, one.index) for one in self.resumed] or [Sequence(self)]
        self.forked = bool(self.resumed) or self.sampling.num_sequences == 1
        self.awaits_kv = self.prefilled
        self.order = self.priority, self.arrival
        self.mrope_positions: IntArray = np.zeros((3, 0), np.int64)
        self._next_prompt_index = 0
        self._next_input = 0
        self.expand_prompt()

    def go_first(self) -> None:
        """Put this request before all requests without this call, whatever their priority."""
        self.priority -= _FIRST
        self.order = self.priority, self.arrival

    @property
    def sequence_ids(self) -> list[int]:
        return [sequence.sequence_id for sequence in self.sequences]

    @property
    def yields_to_text(self) -> bool:
        """Whether prompts of text are computed before this one: it has waited for an encoder, and has no output yet."""
        return bool(self.inputs) and not self.has_output and not self.resumed

    @property
    def num_slots(self) -> int:
        """Number of sequences, now or after the prompt is computed."""
        return len(self.sequences) if self.forked else self.sampling.num_sequences

    # --- the prompt

    def expand_prompt(self) -> None:
        """Append every newly known part of the prompt to `prompt` and to the sequences."""
        if self.is_prompt_known:
            return
        while self._next_input < len(self.inputs) and not self.is_encoder_decoder:
            item = self.inputs[self._next_input]
            assert item.slot.prompt_index is not None
            self._append(self.prompt_token_ids[self._next_prompt_index : item.slot.prompt_index])
            self._next_prompt_index = item.slot.prompt_index
            if item.offer is None:
                return
            layout, item.start = item.offer.layout, len(self.prompt)
            self._append([token_id for token_id, count in layout.expansion for _ in range(count)], layout)
            item.end = len(self.prompt)
            self._next_prompt_index += 1
            self._next_input += 1
        self._append(self.prompt_token_ids[self._next_prompt_index :])
        self.is_prompt_known = True
        generated = {one.index: one.token_ids for one in self.resumed}
        for sequence in self.sequences:
            sequence.token_ids.extend(generated.get(sequence.index, ()))
        if self.prefilled and len(self.sequences) > 1:  # no prefill computes what one of several had generated
            for sequence in self.sequences:
                sequence.num_lost_tokens = len(sequence.token_ids) - 1

    def _append(self, token_ids: ListOf[int], layout: InputLayout | None = None) -> None:
        """Append known tokens: text, or an input."""
        self.prompt.extend(token_ids)
        for sequence in self.sequences:
            sequence.token_ids.extend(token_ids)
        if not self.uses_mrope or not token_ids:
            return
        if layout is None or layout.grid is None:
            self._append_positions(np.tile(np.arange(len(token_ids)), (3, 1)), len(token_ids))
            return
        for _, count in layout.expansion:
            if count != math.prod(layout.grid):  # text of the input, a token each
                self._append_positions(np.zeros((3, 1), np.int64), 1)
                continue
            steps = np.indices(layout.grid).reshape(3, -1)
            if layout.times is not None:
                steps[0] = np.asarray(layout.times)[steps[0]]
            step = max(layout.grid[1:])
            if layout.continues:
                self.mrope_next = max(0, self.mrope_next - step)
            self._append_positions(steps, step)

    def _append_positions(self, steps: IntArray, count: int) -> None:
        """Append positions that count from the next free one; text behind them is `count` further on.

        As in transformers, text after a video follows its height and width, whatever its length in time, and generated
        tokens follow the largest position.
        """
        positions = steps + self.mrope_next
        self.mrope_positions = np.concatenate((self.mrope_positions, positions), axis=1)
        self.mrope_next += count
        self.mrope_end = max(self.mrope_end, int(positions.max()) + 1)

    # --- progress

    @property
    def has_unknown_tokens(self) -> bool:
        return any(sequence.token_ids[-1:] == [UNKNOWN_TOKEN] for sequence in self.sequences)

    @property
    def num_encoder_tokens(self) -> int:
        """Length of the cross-attention table; 0 for a model without cross-attention, or while unknown."""
        if not self.cross_attention:
            return 0
        return sum(item.offer.layout.num_encoder_tokens for item in self.inputs if item.offer is not None)

    @property
    def encoder_content(self) -> str:
        """Key of the cross-attention table: contents, in groups without text in between, and length; empty without
        cross-attention. Requests with equal keys share a table in the order of the groups (cross_ranges)."""
        if not self.cross_attention or not self.inputs:
            return ""
        groups = groups_of([item.start for item in self.inputs])
        contents = (",".join(self.inputs[index].slot.content_hash for index in group) for group in groups)
        return "+".join([*contents, str(self.num_encoder_tokens)])

    @property
    def inputs_are_known(self) -> bool:
        return all(item.offer is not None for item in self.inputs)

    @property
    def num_handoff_tokens(self) -> int:
        """Number of tokens to prefill for a decode worker: all tokens shared by the sequences but the last."""
        return len(self.prompt if len(self.resumed) > 1 else self.sequences[0].token_ids) - 1

    @property
    def num_reusable_tokens(self) -> int:
        """Number of tokens of the first sequence allowed from the prefix cache; each has at least a token to compute.

        Of several sequences only the prompt: each computes what stands in the block after its last full one, so that an
        input there is needed, though the first sequence were found to have it.
        """
        if self.prefill_only:
            return max(0, self.num_handoff_tokens - 1)
        if self.awaits_kv:
            return self.num_handoff_tokens
        most = min(len(sequence.token_ids) for sequence in self.sequences) - 1
        return most if len(self.sequences) == 1 else min(most, len(self.prompt))

    @property
    def is_prefilled_here(self) -> bool:
        """Whether this is a complete prefill for another instance."""
        return self.prefill_only and self.next_missing_input is None and self.num_remaining(self.sequences[0]) <= 0

    def num_computable_tokens(self, sequence: Sequence, num_covered: int = 0, *, cross_covered: bool = False) -> int:
        """Number of tokens of a sequence computable now: up to the first missing input.

        Inputs within the first `num_covered` tokens are not needed, nor are those of a cross table that is there,
        unless they are on their way.
        """
        for item in self.inputs:
            on_its_way = item.state is InputState.GRANTED
            if item.usable:
                continue
            if self.cross_attention:
                if on_its_way or not cross_covered:
                    return 0
            elif item.start is None:
                return len(sequence.token_ids)
            elif on_its_way or item.end is None or item.end > num_covered:
                return item.start
        if self.prefill_only:  # one at least: it is the step of a token that writes the cross table
            return max(1, self.num_handoff_tokens)
        return len(sequence.token_ids)

    def num_remaining(self, sequence: Sequence) -> int:
        """Number of tokens of a running sequence left to compute now."""
        if sequence.is_full:
            return 0
        return self.num_computable_tokens(sequence) - sequence.num_computed_tokens

    def whole_inputs(self, sequence: Sequence, count: int, room: int) -> int:
        """Return how many of the next `count` tokens end within no input, `room` tokens at most.

        A chunk ends before an input, or, begun at one, behind it; 0 where there is no room for the rest of it.
        """
        begin = sequence.num_computed_tokens
        end = begin + count
        for item in self.inputs:
            if item.start is not None and item.end is not None and item.start < end < item.end:
                if item.start > begin:
                    return item.start - begin
                rest = min(item.end - begin, self.num_remaining(sequence))
                return rest if rest <= room else 0
        return count

    @property
    def is_prefilling(self) -> bool:
        """Whether a running request has more than the next token of a sequence to compute now."""
        return any(self.num_remaining(sequence) > 1 for sequence in self.sequences)

    @property
    def next_missing_input(self) -> RequestInput | None:
        return next((item for item in self.inputs if not item.usable), None)

    def finish_spans(self) -> list[Span]:
        self.recorder.end("queue", "inputs", "prefill", "handoff", "decode")
        return self.recorder.spans
