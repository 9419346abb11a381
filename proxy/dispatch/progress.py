"""Progress of each sequence of a job: repeats are dropped, gaps are errors, the rest can be resumed elsewhere."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import msgspec

from common.errors import TriptychError
from common.messages import Resumed, TokenLogprob, Tokens
from common.sampling_params import SamplingParams


@dataclass
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


class Progress:
    """The delivered tokens by sequence. `done` once the job's last message was accepted.

    Log-probabilities of a prompt that another worker computes come from that worker, and belong to the first tokens.
    Tokens that come earlier are withheld until then.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._sequences = [_Sequence() for _ in range(sampling.n)]
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._prompt_logprobs_told = False
        self._withheld: list[Tokens] | None = None  # None: tokens are delivered at once
        self.done = False

    @property
    def withholds(self) -> bool:
        """Whether some tokens are not delivered yet."""
        return bool(self._withheld)

    def start(self, *, prefilled: bool) -> None:
        """Begin on a decoder whose prompt is `prefilled` elsewhere or not; tokens withheld before come again."""
        wanted = self._sampling.prompt_logprobs is not None and not self._prompt_logprobs_told
        self._withheld = [] if prefilled and wanted else None

    def prefilled(self, logprobs: list[TokenLogprob | None]) -> list[Tokens]:
        """Return the news in withheld messages, with the log-probabilities of the computed prompt."""
        if self._withheld is None:
            return []
        messages, self._withheld, self._prompt_logprobs = self._withheld, None, logprobs
        return [news for message in messages if (news := self.accept(message)) is not None]

    def accept(self, message: Tokens) -> Tokens | None:
        """Return the news in a message; None for an old or withheld message.

        Raises TriptychError("internal_error") for an unknown sequence and for missing tokens.
        """
        if self._withheld is not None:
            self._withheld.append(message)
            return None
        if self._prompt_logprobs:
            message = msgspec.structs.replace(message, prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = []
        if message.index >= len(self._sequences):
            text = f"tokens of sequence {message.index} came, {len(self._sequences)} were asked for"
            raise TriptychError("internal_error", text)
        sequence = self._sequences[message.index]
        have = len(sequence.token_ids)
        if message.offset > have:
            text = f"tokens {have} to {message.offset} of sequence {message.index} were lost on the way"
            raise TriptychError("internal_error", text)
        fresh = message.token_ids[have - message.offset :]
        ends = message.finish_reason is not None and not sequence.finished
        sequence.token_ids += fresh
        sequence.finished = sequence.finished or ends
        self.done = message.done
        if not (fresh or ends or message.done):
            return None
        repeats_prompt = bool(message.prompt_logprobs) and self._prompt_logprobs_told
        self._prompt_logprobs_told = self._prompt_logprobs_told or bool(message.prompt_logprobs)
        if message.offset == have and not repeats_prompt and ends == (message.finish_reason is not None):
            return message  # new as a whole, as usual
        return msgspec.structs.replace(
            message,
            offset=have,
            token_ids=fresh,
            finish_reason=message.finish_reason if ends else None,
            logprobs=message.logprobs[have - message.offset :],
            prompt_logprobs=[] if repeats_prompt else message.prompt_logprobs,
        )

    def close(self, enough: Set[int] = frozenset()) -> list[Tokens]:
        """After a loss, end the sequences of full length and return the last messages.

        Sets `done` where no sequence is left but those in `enough`.
        """
        complete = [
            index
            for index, sequence in enumerate(self._sequences)
            if not sequence.finished and len(sequence.token_ids) >= self._sampling.max_tokens
        ]
        for index in complete:
            self._sequences[index].finished = True
        self.done = not self.rest(enough)
        return [Tokens("-", len(self._sequences[index].token_ids), [], "length", index=index) for index in complete]

    def rest(self, enough: Set[int]) -> list[int]:
        """The incomplete sequences without those in `enough`."""
        return [i for i, sequence in enumerate(self._sequences) if not sequence.finished and i not in enough]

    def resumed(self, enough: Set[int]) -> list[Resumed]:
        """Return the state for another instance to continue the rest. Empty: the whole request starts again.

        Beam search starts again, because no token is delivered before the end.
        """
        begun = any(sequence.token_ids or sequence.finished for sequence in self._sequences)
        if self._sampling.uses_beams or not begun:
            return []
        return [Resumed(index, list(self._sequences[index].token_ids)) for index in self.rest(enough)]
