"""Messages of generated tokens, and the ends of sequences."""

from __future__ import annotations

from common.messages import FinishReason, TokenLogprob, Tokens
from common.model_info import ModelInfo
from engine.core.decoding import BeamsEnded, NewToken
from engine.scheduler.decoder import DecoderScheduler
from engine.state.request import Request, Sequence


class OutputProcessor:
    """Turns chosen tokens into messages. The last message of a request has `done`: the caller ends the request."""

    def __init__(self, info: ModelInfo, scheduler: DecoderScheduler, max_model_len: int) -> None:
        self._info = info
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._max_model_len = max_model_len
        self.counters = {"prompt_tokens": 0, "generated_tokens": 0}

    def token(self, new: NewToken) -> Tokens:
        """Return the message of a token; an ended sequence is freed and leaves its request."""
        sequence, request = new.sequence, new.sequence.request
        self._count_tokens(request, 1)
        offset, reason = new.position - len(request.prompt), self._finish_reason(new)
        if reason is not None:
            self._scheduler.remove_sequence(sequence)
            request.sequences.remove(sequence)
        done = not request.sequences
        return Tokens(
            request.request_id,
            offset,
            [new.token_id],
            reason,
            len(request.prompt),
            spans=request.finish_spans() if done else [],
            done=done,
            num_cached_tokens=request.num_cached_tokens,
            index=sequence.index,
            logprobs=[] if new.logprob is None else [new.logprob],
            prompt_logprobs=_pop_prompt_logprobs(request),
            attempt=request.attempt,
        )

    def beams(self, ended: BeamsEnded) -> list[Tokens]:
        """Return the messages of all hypotheses of a beam search: none is certain before the end."""
        request, messages = ended.request, []
        for index, one in enumerate(ended.hypotheses):
            self._count_tokens(request, len(one.token_ids))
            ends = (*self._info.eos_token_ids, *request.sampling.stop_token_ids)
            done = index == len(ended.hypotheses) - 1
            message = Tokens(
                request.request_id,
                0,
                one.token_ids,
                "stop" if one.token_ids[-1] in ends else "length",
                len(request.prompt),
                spans=request.finish_spans() if done else [],
                done=done,
                num_cached_tokens=request.num_cached_tokens,
                index=index,
                prompt_logprobs=_pop_prompt_logprobs(request),
                score=one.score,
                attempt=request.attempt,
            )
            messages.append(message)
        return messages

    def _count_tokens(self, request: Request, count: int) -> None:
        self.counters["generated_tokens"] += count
        if not request.has_output:
            request.has_output = True
            request.recorder.end("inputs")
            request.recorder.end("prefill")
            request.recorder.start("decode")
            self.counters["prompt_tokens"] += len(request.prompt)

    def _finish_reason(self, new: NewToken) -> FinishReason | None:
        request, params, token_id = new.sequence.request, new.sequence.sampling, new.token_id
        in_prefix = new.position - len(request.prompt) < len(params.prefix_allowed)
        if token_id in params.stop_token_ids and not in_prefix:
            return "stop"
        if token_id in self._info.eos_token_ids and not params.ignore_eos and not in_prefix:
            return "stop"
        if self.is_full(new.sequence, new.position + 1):
            return "length"
        # What outgrows the whole pool ends here: preempting it would only make it start over, forever.
        if self.fits_ever(request):
            return None
        known = [one.num_known_tokens for one in request.sequences]  # the effect of others is decided later
        fits = self._blocks.fits_ever(len(request.prompt), known, request.num_encoder_tokens)
        return None if fits else "length"

    def is_full(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return True if a sequence of `num_tokens` takes no further token."""
        num_output_tokens = num_tokens - len(sequence.request.prompt)
        return num_output_tokens >= sequence.sampling.max_tokens or num_tokens >= self._max_model_len

    def fits_ever(self, request: Request) -> bool:
        """Return True if the whole pool holds all sequences of a request after another step."""
        return self._blocks.fits_ever(
            len(request.prompt), [len(one.token_ids) for one in request.sequences], request.num_encoder_tokens
        )


def _pop_prompt_logprobs(request: Request) -> list[TokenLogprob | None]:
    found, request.prompt_logprobs = request.prompt_logprobs, []
    request.prompt_logprobs_sent = request.prompt_logprobs_sent or bool(found)
    return found
