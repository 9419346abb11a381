"""Check requests before any memory is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ErrorInfo, TriptychError
from common.messages import InputSlot, Resumed
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.cache.block_manager import BlockManager
from engine.state.request import Request


@dataclass(frozen=True)
class RequestLimits:
    """The limits of an engine. Lengths are in tokens, expanded media included."""

    info: ModelInfo
    vocab_size: int
    max_model_len: int
    max_sequences: int

    def check(self, prompt: list[int], inputs: list[InputSlot], sampling: SamplingParams) -> None:
        """Raise TriptychError naming the value and the rule where a new request cannot be served."""
        sampling.validate()
        if sampling.num_sequences > self.max_sequences:
            message = f"{sampling.num_sequences} sequences at once; this server runs at most {self.max_sequences}"
            raise TriptychError("invalid_request", message, "beam_width" if sampling.uses_beams else "n")
        if not prompt:
            raise TriptychError("invalid_request", "the prompt is empty", "prompt")
        placeholder = self.info.placeholder_token_id  # Mllama's has an embedding, but no place in the output
        bad = next((token for token in prompt if not 0 <= token < self.vocab_size and token != placeholder), None)
        if bad is not None:
            message = f"token id {bad} is outside the vocabulary of {self.vocab_size}"
            raise TriptychError("invalid_request", message, "prompt")
        if len(prompt) >= self.max_model_len:
            raise TriptychError("context_length_exceeded", self._too_long(len(prompt)), "messages")
        self._check_inputs(prompt, inputs)

    def check_resumed(self, resumed: Sequence[Resumed], sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Raise TriptychError for resumed sequences impossible under the request's sampling."""
        if len({one.index for one in resumed if one.index < sampling.num_sequences}) != len(resumed):
            indices = [one.index for one in resumed]
            message = f"sequences {indices} of a request of {sampling.num_sequences} cannot be resumed"
            raise TriptychError("invalid_request", message, "resumed")
        for one in resumed:
            if num_prompt_tokens + len(one.token_ids) > self.max_model_len:
                length = num_prompt_tokens + len(one.token_ids)
                raise TriptychError("context_length_exceeded", self._too_long(length), "resumed")
            bad = next((token for token in one.token_ids if not 0 <= token < self.vocab_size), None)
            if bad is not None:
                message = f"token id {bad} to resume from is outside the vocabulary of {self.vocab_size}"
                raise TriptychError("invalid_request", message, "resumed")

    def never_fits(self, request: Request, blocks: BlockManager) -> ErrorInfo | None:
        """Return why a request, as far as the prompt is known, can never run here; None if the request can."""
        length = request.num_known_tokens
        if length >= self.max_model_len:
            return ErrorInfo("context_length_exceeded", self._too_long(length), "messages")
        if blocks.fits_ever(len(request.prompt), _least_lengths(request), request.num_encoder_tokens):
            return None
        message = (
            f"the request needs KV cache for {length + 1 + request.num_encoder_tokens} tokens, the whole pool holds "
            f"{blocks.pool.num_usable * blocks.block_size}: shorten it, or serve with a larger --kv-cache-bytes"
        )
        return ErrorInfo("context_length_exceeded", message, "messages")

    def _check_inputs(self, prompt: list[int], inputs: list[InputSlot]) -> None:
        name, placeholder = self.info.name, self.info.placeholder_token_id
        if self.info.is_encoder_decoder:
            if len(inputs) != 1 or inputs[0].prompt_index is not None:
                message = f"{name} takes exactly one {self.info.media_kind}, got {len(inputs)}"
                raise TriptychError("invalid_request", message)
            return
        if inputs and placeholder is None:
            raise TriptychError("invalid_request", f"{name} takes no media, got {len(inputs)} items")
        indices = [item.prompt_index for item in inputs]
        expected = [index for index, token in enumerate(prompt) if token == placeholder]
        if indices != expected or [item.input_id for item in inputs] != list(range(len(inputs))):
            message = f"inputs stand at {indices}, but the prompt has placeholders at {expected}"
            raise TriptychError("invalid_request", message)

    def _too_long(self, num_tokens: int) -> str:
        return (
            f"the prompt has {num_tokens} tokens (media included), the context length is {self.max_model_len} and at "
            "least one token has to be generated: shorten the prompt or send smaller or fewer media"
        )


def _least_lengths(request: Request) -> list[int]:
    """Return the lengths of the sequences before a further token; resumed sequences have output already."""
    least = len(request.prompt) + 1
    if request.resumed:
        return [max(least, len(sequence.token_ids)) for sequence in request.sequences]
    return [least] * request.sampling.num_sequences
