"""Messages of generated tokens, and the ends of sequences."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from common.messages import FinishReason, TokenLogprob, Tokens
from common.model_info import ModelInfo
from engine.core.decoding import BeamsEnded, NewToken
from engine.scheduler.decoder import DecoderScheduler
from engine.state.request import Request, Sequence


@dataclass(eq=False)
class OutputProcessor:
    """Turns chosen tokens into messages. The last message of a request has `done`: the caller ends the request."""

    info: ModelInfo
    scheduler: DecoderScheduler
    max_model_len: int

    def __post_init__(self) -> None:
        self.counters = {"prompt_tokens": 0, "generated_tokens": 0}

    def token(self, new: NewToken) -> Tokens:
        """Return the message of a token; an ended sequence is freed and leaves its request."""
        sequence, request = new.sequence, new.sequence.request
        self._count_tokens(request, 1)
        offset, reason = new.position - len(request.prompt), self._finish_reason(new)
        if reason is not None:
            self.scheduler.remove_sequence(sequence)
            request.sequences.remove(sequence)
        logprobs = [] if new.logprob is None else [new.logprob]
        done = not request.sequences
        return _message(request, sequence.index, offset, [new.token_id], reason, done=done, logprobs=logprobs)

    def beams(self, ended: BeamsEnded) -> list[Tokens]:
        """Return the messages of all hypotheses of a beam search: none is certain before the end."""
        request, messages = ended.request, []
        for index, one in enumerate(ended.hypotheses):
            self._count_tokens(request, len(one.token_ids))
            reason: FinishReason = "stop" if one.stopped else "length"
            done = index == len(ended.hypotheses) - 1
            messages.append(_message(request, index, 0, one.token_ids, reason, done=done, score=one.score))
        return messages

    def _count_tokens(self, request: Request, count: int) -> None:
        self.counters["generated_tokens"] += count
        if not request.has_output:
            request.has_output = True
            request.recorder.end("inputs", "prefill")
            request.recorder.start("decode")
            self.counters["prompt_tokens"] += len(request.prompt)

    def _finish_reason(self, new: NewToken) -> FinishReason | None:
        request, params, token_id = new.sequence.request, new.sequence.sampling, new.token_id
        in_prefix = new.position - len(request.prompt) < len(params.prefix_allowed)
        if token_id in params.stop_token_ids and not in_prefix:
            return "stop"
        if token_id in self.info.eos_token_ids and not params.ignore_eos and not in_prefix:
            return "stop"
        if self.is_full(new.sequence, new.position + 1):
            return "length"
        # What outgrows the whole pool ends here: preempting it would only make it start over, forever.
        if self.fits_ever(request):
            return None
        known = [one.num_known_tokens for one in request.sequences]  # the effect of others is decided later
        fits = self.scheduler.blocks.fits_ever(len(request.prompt), known, request.num_encoder_tokens)
        return None if fits else "length"

    def is_full(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return True if a sequence of `num_tokens` takes no further token."""
        num_output_tokens = num_tokens - len(sequence.request.prompt)
        return num_output_tokens >= sequence.sampling.max_tokens or num_tokens >= self.max_model_len

    def fits_ever(self, request: Request) -> bool:
        """Return True if the whole pool holds all sequences of a request after another step."""
        return self.scheduler.blocks.fits_ever(
            len(request.prompt), [len(one.token_ids) for one in request.sequences], request.num_encoder_tokens
        )


def _message(
    request: Request,
    index: int,
    offset: int,
    token_ids: list[int],
    reason: FinishReason | None,
    *,
    done: bool,
    logprobs: ListOf[TokenLogprob] = (),
    score: float | None = None,
) -> Tokens:
    """Return a message of new tokens, with log-probabilities of the prompt that have not been told yet."""
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
    request.prompt_logprobs_sent = request.prompt_logprobs_sent or bool(prompt_logprobs)
    return Tokens(
        request.request_id,
        offset,
        token_ids,
        reason,
        len(request.prompt),
        spans=request.finish_spans() if done else [],
        done=done,
        num_cached_tokens=request.num_cached_tokens,
        index=index,
        logprobs=list(logprobs),
        prompt_logprobs=prompt_logprobs,
        score=score,
        attempt=request.attempt,
    )
