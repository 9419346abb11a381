"""Make requests of incoming messages: checked, and reduced to this engine's share of the work."""

from __future__ import annotations

import random
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import msgspec

from common.errors import TriptychError
from common.messages import Generate, InputSlot, Resumed
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.scheduler.capacity import too_long
from engine.state.request import Request, RequestInput
from engine.state.spec import DecoderSpec


@dataclass(frozen=True)
class RequestFactory:
    """Make the requests of an engine within its limits; `instance` names their spans.

    Lengths are in tokens, expanded media included.
    """

    info: ModelInfo
    spec: DecoderSpec
    max_model_len: int
    max_sequences: int
    sampler: Sampler
    instance: str

    def _check(self, prompt: list[int], inputs: list[InputSlot], sampling: SamplingParams) -> None:
        """Raise TriptychError naming the value and the rule where a new request cannot be served."""
        sampling.validate()
        if sampling.num_sequences > self.max_sequences:
            message = f"{sampling.num_sequences} sequences at once; this server runs at most {self.max_sequences}"
            raise TriptychError("invalid_request", message, "beam_width" if sampling.uses_beams else "n")
        if not prompt:
            raise TriptychError("invalid_request", "the prompt is empty", "prompt")
        known = self.info.placeholders  # Mllama's has an embedding, but no place in the output
        bad = next((token for token in prompt if not 0 <= token < self.spec.vocab_size and token not in known), None)
        if bad is not None:
            message = f"token id {bad} is outside the vocabulary of {self.spec.vocab_size}"
            raise TriptychError("invalid_request", message, "prompt")
        if len(prompt) >= self.max_model_len:
            raise TriptychError("context_length_exceeded", too_long(len(prompt), self.max_model_len), "messages")
        wanted = sampling.alignment
        if wanted is not None and not (self.info.is_encoder_decoder and 0 < wanted.first_token < len(prompt)):
            message = (
                f"alignment from token {wanted.first_token} of {len(prompt)}: needs a speech model, and a token before"
            )
            raise TriptychError("invalid_request", message, "alignment")
        if wanted is not None and wanted.num_frames < 1:
            raise TriptychError("invalid_request", "alignment needs at least one frame", "alignment")
        if sampling.adapter and sampling.adapter not in self.info.adapters:
            there = ", ".join(map(repr, self.info.adapters)) or "none"
            message = f"the adapter {sampling.adapter[:100]!r} does not exist here; {self.info.name} has {there}"
            raise TriptychError("model_not_found", message, "adapter")
        self._check_inputs(prompt, inputs)

    def _check_resumed(self, resumed: ListOf[Resumed], sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Raise TriptychError for resumed sequences impossible under the request's sampling."""
        if len({one.index for one in resumed if one.index < sampling.num_sequences}) != len(resumed):
            indices = [one.index for one in resumed]
            message = f"sequences {indices} of a request of {sampling.num_sequences} cannot be resumed"
            raise TriptychError("invalid_request", message, "resumed")
        for one in resumed:
            if num_prompt_tokens + len(one.token_ids) > self.max_model_len:
                length = num_prompt_tokens + len(one.token_ids)
                raise TriptychError("context_length_exceeded", too_long(length, self.max_model_len), "resumed")
            bad = next((token for token in one.token_ids if not 0 <= token < self.spec.vocab_size), None)
            if bad is not None:
                message = f"token id {bad} to resume from is outside the vocabulary of {self.spec.vocab_size}"
                raise TriptychError("invalid_request", message, "resumed")

    def _check_inputs(self, prompt: list[int], inputs: list[InputSlot]) -> None:
        name, placeholders = self.info.name, self.info.placeholders
        if self.info.is_encoder_decoder:
            if len(inputs) != 1 or inputs[0].prompt_index is not None:
                message = f"{name} takes exactly one {self.info.media_kind}, got {len(inputs)}"
                raise TriptychError("invalid_request", message)
            return
        if inputs and not placeholders:
            raise TriptychError("invalid_request", f"{name} takes no media, got {len(inputs)} items")
        indices = [(item.prompt_index, item.kind) for item in inputs]
        expected = [(index, placeholders[token]) for index, token in enumerate(prompt) if token in placeholders]
        if indices != expected or [item.input_id for item in inputs] != list(range(len(inputs))):
            message = f"inputs stand at {indices}, but the prompt has placeholders at {expected}"
            raise TriptychError("invalid_request", message)

    def create(self, message: Generate, arrival: int) -> Request:
        """Raises TriptychError where the request cannot be served, naming the value and the rule."""
        prompt, inputs, sampling, resumed = message.prompt_token_ids, message.inputs, message.sampling, message.resumed
        if sampling.uses_beams:
            resumed = []  # nothing of a beam search has been told
        if message.prefill_for:
            # A single sequence, without output rules; the output of an only resumed sequence is prefilled, too.
            sampling = msgspec.structs.replace(sampling, n=1, beam_width=1, grammar=None)
            resumed = [msgspec.structs.replace(resumed[0], index=0)] if len(resumed) == 1 else []
        elif message.prefilled:  # what is told of a prompt is known where it is computed
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None, alignment=None)
        self._check(prompt, inputs, sampling)
        if resumed:
            self._check_resumed(resumed, sampling, len(prompt))
        self.sampler.check(sampling)
        return Request(
            message.request_id,
            prompt,
            [RequestInput(slot) for slot in inputs],
            sampling,
            arrival,
            priority=message.priority,
            seed=sampling.seed if sampling.seed is not None else random.getrandbits(62),
            is_encoder_decoder=self.info.is_encoder_decoder,
            cross_attention=self.info.has_cross_attention,
            uses_mrope=self.spec.mrope_section is not None,
            instance=self.instance,
            resumed=tuple(resumed),
            prefill_only=bool(message.prefill_for),
            prefilled=message.prefilled,
            attempt=message.attempt,
        )
