"""Log-probabilities of a prompt's tokens, computed along with the prompt."""

from __future__ import annotations

from typing import Final

from engine.runner.decoder import DecoderRunner, PromptRows
from engine.sampling.sampler import Sampler
from engine.state.request import Request

_ROWS: Final = 256
"""Prompt tokens whose logits are held at once."""


class PromptLogprobs:
    """Adds to `Request.prompt_logprobs`."""

    def __init__(self, runner: DecoderRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def add(self, rows: PromptRows) -> None:
        """Add log-probabilities of the tokens after the present step's tokens; media tokens have none."""
        request = rows.sequence.request
        known, count = request.prompt_logprobs, request.sampling.prompt_logprobs
        assert count is not None
        if not known:
            known.append(None)
        for position in range(len(known), rows.first + 1):
            assert _is_media(request, position)  # which was not known yet when the rows before it were computed
            known.append(None)
        end = min(rows.first + len(rows.hidden) + 1, len(request.prompt))
        while len(known) < end:  # some may be known from before a preemption
            first = len(known)
            positions = range(first, min(first + _ROWS, end))
            media = [_is_media(request, position) for position in positions]
            # The placeholder of media may have an id for which the model has no logit.
            tokens = [0 if media[i] else request.prompt[position] for i, position in enumerate(positions)]
            offset = first - 1 - rows.first  # the logits for a token are those of the one before it
            logits = self._runner.logits(rows.hidden[offset : offset + len(tokens)])
            found = self._sampler.prompt_logprobs(logits, tokens, count)
            known += [None if is_media else one for is_media, one in zip(media, found, strict=True)]


def _is_media(request: Request, position: int) -> bool:
    return any(
        item.start is not None and item.start <= position < item.start + item.num_prompt_tokens
        for item in request.inputs
    )
