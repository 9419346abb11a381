"""A request inside the engine: its prompt as far as it is known, its inputs, its tokens.

The prompt arrives with one placeholder token per input. Placeholders are expanded in order, as soon as the sizes of
the inputs are known; what stands after an input of unknown size is not known yet:

    prompt        t t t P t t P t t            P: placeholder, one per input
    expanded      t t t p p p p t t | P t t    size of input 0 known, size of input 1 not
                                    ^ len(token_ids)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.messages import InputSlot, Span
from common.sampling_params import SamplingParams
from common.telemetry import SpanRecorder
from engine.events import InputMetadata

IntArray = npt.NDArray[np.int64]


class InputState(enum.Enum):
    """Where an input of a request is on its way into the prompt."""

    MISSING = "missing"  # nobody has offered it yet
    OFFERED = "offered"  # offered, waiting for room
    GRANTED = "granted"  # room is reserved, the tensor is on its way
    READY = "ready"  # in the encoder cache
    CONSUMED = "consumed"  # prefilled: its values live in the KV cache, the encoder output is released


@dataclass(eq=False)
class RequestInput:
    """One input of one request. `start` is where its expansion begins in the expanded prompt."""

    slot: InputSlot
    state: InputState = InputState.MISSING
    metadata: InputMetadata | None = None
    attempt: int = -1
    deadline_s: float = 0.0
    start: int | None = None

    @property
    def usable(self) -> bool:
        return self.state in (InputState.READY, InputState.CONSUMED)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the placeholder became."""
        assert self.metadata is not None
        return sum(count for _, count in self.metadata.layout.expansion)


@dataclass(eq=False)
class Request:
    """A request with one sequence. `arrival` orders requests; `instance` names the spans."""

    request_id: str
    prompt_token_ids: list[int]
    inputs: list[RequestInput]
    sampling: SamplingParams
    arrival: int
    is_encoder_decoder: bool = False
    uses_mrope: bool = False
    instance: str = "engine"
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_computed_tokens: int = 0
    num_sent_tokens: int = 0
    num_preemptions: int = 0
    slot_index: int = -1
    mrope_positions: list[IntArray] = field(default_factory=list)
    mrope_next: int = 0

    def __post_init__(self) -> None:
        self.recorder = SpanRecorder(self.instance)
        self._next_prompt_index = 0
        self._next_input = 0
        self.expand_prompt()

    @classmethod
    def create(cls, request_id: str, prompt: Sequence[int], slots: Sequence[InputSlot], **rest: object) -> Request:
        return cls(request_id, list(prompt), [RequestInput(slot) for slot in slots], **rest)  # type: ignore[arg-type]

    # --- the prompt

    def expand_prompt(self) -> None:
        """Append every part of the prompt that is known by now to `token_ids`."""
        if self.num_prompt_tokens is not None:
            return
        while self._next_input < len(self.inputs) and not self.is_encoder_decoder:
            item = self.inputs[self._next_input]
            assert item.slot.prompt_index is not None
            self._append_text(self.prompt_token_ids[self._next_prompt_index : item.slot.prompt_index])
            self._next_prompt_index = item.slot.prompt_index
            if item.metadata is None:
                return
            item.start = len(self.token_ids)
            self._append_input(item)
            self._next_prompt_index += 1
            self._next_input += 1
        self._append_text(self.prompt_token_ids[self._next_prompt_index :])
        self.num_prompt_tokens = len(self.token_ids)

    def _append_text(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        if self.uses_mrope and token_ids:
            steps = np.arange(self.mrope_next, self.mrope_next + len(token_ids))
            self.mrope_positions.append(np.broadcast_to(steps, (3, len(token_ids))))
            self.mrope_next += len(token_ids)

    def _append_input(self, item: RequestInput) -> None:
        assert item.metadata is not None
        layout = item.metadata.layout
        for token_id, count in layout.expansion:
            self.token_ids.extend([token_id] * count)
        if not self.uses_mrope:
            return
        if layout.grid is None:
            steps = np.broadcast_to(np.arange(item.num_prompt_tokens), (3, item.num_prompt_tokens))
        else:
            steps = np.indices(layout.grid).reshape(3, -1)
        self.mrope_positions.append(steps + self.mrope_next)
        self.mrope_next += int(steps.max(initial=-1)) + 1

    def prompt_positions(self) -> IntArray:
        """3-D rotary positions of the known prompt, [3, n] (Qwen2-VL, section 2.1: time, height, width)."""
        if len(self.mrope_positions) > 1:
            self.mrope_positions = [np.concatenate(self.mrope_positions, axis=1)]
        return self.mrope_positions[0] if self.mrope_positions else np.zeros((3, 0), np.int64)

    # --- progress

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :] if self.num_prompt_tokens is not None else []

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens if self.num_prompt_tokens is not None else 0

    @property
    def num_encoder_tokens(self) -> int:
        """Length of the cross-attention table; 0 for a decoder-only model or while unknown."""
        if not self.is_encoder_decoder:
            return 0
        return sum(item.metadata.layout.num_encoder_tokens for item in self.inputs if item.metadata is not None)

    @property
    def encoder_content(self) -> str:
        """What the cross-attention reads: content and length; empty for a decoder-only model."""
        if not self.is_encoder_decoder:
            return ""
        return "+".join([*(item.slot.content_hash for item in self.inputs), str(self.num_encoder_tokens)])

    @property
    def num_computable_tokens(self) -> int:
        """How far the sequence can be computed now: up to the first input that is still missing."""
        for item in self.inputs:
            if not item.usable:
                if self.is_encoder_decoder:
                    return 0
                return len(self.token_ids) if item.start is None else item.start
        return len(self.token_ids)

    @property
    def next_missing_input(self) -> RequestInput | None:
        return next((item for item in self.inputs if not item.usable), None)

    @property
    def prefill_done(self) -> bool:
        return self.num_prompt_tokens is not None and self.num_output_tokens > 0

    def finish_spans(self) -> list[Span]:
        for stage in ("queue", "inputs", "prefill", "decode"):
            self.recorder.end(stage)
        return self.recorder.spans
