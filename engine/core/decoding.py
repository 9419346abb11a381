"""From logits to the next tokens of every sequence: forks after the prompt, sampling, and beam search.

logits of a prompt's last token ──┬── one sequence          -> sample
                                  ├── n > 1: fork n - 1     -> sample each with draws of its own
                                  └── beams: the search picks parents and tokens -> fork, drop
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor

from common.errors import ErrorInfo, words_of
from common.messages import TokenLogprob
from common.telemetry import get_logger
from engine.device.h2d import select_rows
from engine.runner.decoder import DecoderRunner, PromptRows, StepOutput
from engine.sampling.beam import BeamSearch, Hypothesis
from engine.sampling.logprobs import describe_tokens
from engine.sampling.pending import PendingTokens
from engine.sampling.sampler import Sampler
from engine.scheduler.capacity import too_long
from engine.scheduler.decoder import DecoderScheduler
from engine.state.request import UNKNOWN_TOKEN, Request, Sequence

log = get_logger()

_NO_HYPOTHESIS = ErrorInfo(
    "invalid_request",
    "no beam could end: its rules for tokens contradict each other (relax them), or length_penalty is too low",
)


_ROWS: Final = 256
"""Prompt tokens whose logits are held at once."""


@dataclass(frozen=True)
class NewToken:
    """The next token of a sequence, already at `position`."""

    sequence: Sequence
    position: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class TokensInFlight:
    """Tokens chosen on the device; UNKNOWN_TOKEN stands at each position."""

    sequences: list[Sequence]
    positions: list[int]
    tokens: PendingTokens


@dataclass(frozen=True)
class GenerationFailed:
    """The end of a request whose rules have become impossible."""

    request: Request
    error: ErrorInfo


@dataclass(frozen=True)
class BeamsEnded:
    """The hypotheses of a finished beam search, best first."""

    request: Request
    hypotheses: list[Hypothesis]


Result: TypeAlias = NewToken | BeamsEnded | GenerationFailed


@dataclass(eq=False)
class Decoding:
    """Chooses tokens, and keeps sequences and block tables in step."""

    runner: DecoderRunner
    scheduler: DecoderScheduler
    sampler: Sampler
    eos_token_ids: ListOf[int]
    _searches: WeakKeyDictionary[Request, BeamSearch] = field(default_factory=WeakKeyDictionary)

    @torch.inference_mode()
    def choose(self, output: StepOutput) -> list[Result]:
        """Append the next token to every sequence of a step's output."""
        results: list[Result] = []
        for rows in output.prompt_rows:
            with self._containing(rows.sequence.request, results):
                self._add_prompt_logprobs(rows)
        beams: dict[Request, list[int]] = {}
        others: list[int] = []
        for row, sequence in enumerate(output.sequences):
            if sequence.sampling.uses_beams:
                beams.setdefault(sequence.request, []).append(row)
            else:
                others.append(row)
        for request, rows_of_request in beams.items():
            sequences = [output.sequences[row] for row in rows_of_request]
            with self._containing(request, results):
                ended = self._step_beams(request, sequences, select_rows(output.logits, rows_of_request))
                results += [] if ended is None else [ended]
        if others:
            logits, sampled = self._fork_rows(output, others)
            for sequence, one in zip(sampled, self.sampler.sample(logits, sampled), strict=True):
                if one.error is not None:
                    results.append(GenerationFailed(sequence.request, one.error))
                    continue
                results.append(NewToken(sequence, len(sequence.token_ids), one.token_id, one.logprob))
                sequence.token_ids.append(one.token_id)
        return results

    def can_run_ahead(self, output: StepOutput) -> bool:
        """Return True if the host has no part in the choice of tokens: no beams, no rules on known tokens, no
        log-probabilities of a prompt."""
        return not output.prompt_rows and all(
            not sequence.sampling.uses_beams and self.sampler.can_run_ahead(sequence) for sequence in output.sequences
        )

    @torch.inference_mode()
    def launch(self, output: StepOutput) -> TokensInFlight:
        """Choose the next tokens on the device, without waiting."""
        logits, sequences = self._fork_rows(output, list(range(len(output.sequences))))
        tokens = self.sampler.launch(logits, sequences)
        positions = [len(sequence.token_ids) for sequence in sequences]
        for sequence in sequences:
            sequence.token_ids.append(UNKNOWN_TOKEN)
        return TokensInFlight(sequences, positions, tokens)

    def collect(self, batch: TokensInFlight) -> list[NewToken]:
        """Wait for tokens in flight and put all into place, also for ended sequences."""
        results: list[NewToken] = []
        for sequence, position, one in zip(batch.sequences, batch.positions, batch.tokens.wait(), strict=True):
            sequence.token_ids[position] = one.token_id
            results.append(NewToken(sequence, position, one.token_id, one.logprob))
        return results

    def _fork_rows(self, output: StepOutput, rows: list[int]) -> tuple[Tensor, list[Sequence]]:
        """Logits and the sequences that sample from them; a prompt that is computed forks into those of its request."""
        sampled: list[Sequence] = []
        sampled_rows: list[int] = []
        for row in rows:
            sequence = output.sequences[row]
            family, request = [sequence], sequence.request
            if not request.forked:
                request.forked = True
                for index in range(1, request.sampling.n):
                    request.sequences.append(self._fork(sequence, index))
                family = request.sequences
            sampled += family
            sampled_rows += [row] * len(family)
        everyone = sampled_rows == list(range(len(output.logits)))
        return output.logits if everyone else select_rows(output.logits, sampled_rows), sampled

    @contextlib.contextmanager
    def _containing(self, request: Request, results: list[Result]) -> Iterator[None]:
        """Confine an error to a single request of a shared step."""
        try:
            yield
        except Exception as error:  # whatever it is, the others have nothing to do with it
            log.exception("a request failed while its tokens were chosen", request=request.request_id)
            message = f"the engine failed on this request: {words_of(error)}"
            results.append(GenerationFailed(request, ErrorInfo("internal_error", message)))

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        child = parent.fork(index)
        self.scheduler.blocks.fork(parent.sequence_id, child.sequence_id)
        return child

    def _step_beams(
        self, request: Request, sequences: list[Sequence], logits: Tensor
    ) -> BeamsEnded | GenerationFailed | None:
        num_forced = len(request.prompt) + len(request.sampling.prefix_allowed)
        if len(sequences[0].token_ids) < num_forced:
            if num_forced > self.runner.max_model_len:
                message = too_long(num_forced, self.runner.max_model_len)
                return GenerationFailed(request, ErrorInfo("context_length_exceeded", message, "messages"))
            # Before the search proper: a language is detected once, not once per beam.
            self.sampler.apply_rules(logits, sequences)
            sequences[0].token_ids.append(int(logits[0].argmax()))
            return None
        search = self._searches.get(request)
        if search is None:
            search = self._searches[request] = self._begin_search(request)
        log_probs = torch.log_softmax(logits, dim=-1)
        self.sampler.apply_rules(log_probs, sequences)
        errors = [self.sampler.error(sequence) for sequence in sequences]
        if errors[0] is not None and all(errors):
            return GenerationFailed(request, errors[0])
        beams = search.step(log_probs, [sequence.output_token_ids for sequence in sequences])
        if beams is None:
            hypotheses = search.best()
            return BeamsEnded(request, hypotheses) if hypotheses else GenerationFailed(request, _NO_HYPOTHESIS)
        request.forked = True
        continued: set[int] = set()
        next_sequences = []
        for index, beam in enumerate(beams):  # children are forked before any parent gets its token
            parent = sequences[beam.parent % len(sequences)]
            again = parent.sequence_id in continued
            next_sequences.append(self._fork(parent, index) if again else parent)
            continued.add(parent.sequence_id)
        for sequence in sequences:
            if sequence.sequence_id not in continued:
                self.scheduler.remove_sequence(sequence)
        for index, (sequence, beam) in enumerate(zip(next_sequences, beams, strict=True)):
            sequence.index = index
            sequence.token_ids.append(beam.token_id)
        request.sequences = next_sequences
        return None

    def _begin_search(self, request: Request) -> BeamSearch:
        sampling = request.sampling
        ends = sampling.stop_token_ids if sampling.ignore_eos else (*self.eos_token_ids, *sampling.stop_token_ids)
        longest = min(sampling.max_tokens, self.runner.max_model_len - len(request.prompt))
        num_prompt, width, rows = len(request.prompt), sampling.beam_width, request.num_encoder_tokens
        while longest > 1 and not self.scheduler.blocks.fits_ever(num_prompt, [num_prompt + longest] * width, rows):
            longest -= self.scheduler.blocks.block_size  # until the whole pool holds all beams
        return BeamSearch(sampling, ends, max(1, longest))

    def _add_prompt_logprobs(self, rows: PromptRows) -> None:
        """Add log-probabilities of the tokens after the present step's tokens; media tokens have none."""
        request = rows.sequence.request
        known, count = request.prompt_logprobs, request.sampling.prompt_logprobs
        # They may have been sent since the rows were selected, with the tokens in flight.
        if request.prompt_logprobs_sent or len(known) == len(request.prompt):
            return
        assert count is not None
        if not known:
            known.append(None)
        for position in range(len(known), rows.first + 1):
            assert _is_media(request, position)  # which was not known yet when the rows before it were computed
            known.append(None)
        end = min(rows.first + len(rows.hidden) + 1, len(request.prompt))
        self._keep_queries(rows)
        while len(known) < end:  # some may be known from before a preemption
            first = len(known)
            positions = range(first, min(first + _ROWS, end))
            media = [_is_media(request, position) for position in positions]
            # The placeholder of media may have an id for which the model has no logit.
            tokens = [0 if media[i] else request.prompt[position] for i, position in enumerate(positions)]
            offset = first - 1 - rows.first  # the logits for a token are those of the one before it
            logits = self.runner.logits(rows.hidden[offset : offset + len(tokens)])
            found = describe_tokens(logits, tokens, [count] * len(tokens))
            known += [None if is_media else one for is_media, one in zip(media, found, strict=True)]
        if request.sampling.alignment is not None and len(known) == len(request.prompt) and request.cross_queries:
            frames = self.runner.align(request, request.cross_queries, self.scheduler.blocks)
            first = request.sampling.alignment.first_token
            for place, frame in enumerate(frames, first):
                one = known[place]
                known[place] = None if one is None else msgspec.structs.replace(one, frame=frame)
            request.cross_queries = []

    def _keep_queries(self, rows: PromptRows) -> None:
        """Keep the queries of tokens that are new: after a preemption tokens are computed again."""
        kept, layers = rows.sequence.request.cross_queries, rows.queries
        if layers:
            num_kept = sum(len(next(iter(part.values()))) for part in kept)
            kept.append({layer: queries[max(0, num_kept - rows.first) :] for layer, queries in layers.items()})


def _is_media(request: Request, position: int) -> bool:
    return any(
        item.start is not None and item.end is not None and item.start <= position < item.end for item in request.inputs
    )
