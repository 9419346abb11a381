"""How far each sequence of a job has come: repeats are dropped, gaps are errors, the rest can be resumed elsewhere."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import msgspec

from common.errors import TriptychError
from common.messages import Resumed, Tokens
from common.sampling_params import SamplingParams


@dataclass
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


class Progress:
    """The tokens that have been delivered, by sequence. `done` once the job's last message has been accepted."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._sequences = [_Sequence() for _ in range(sampling.n)]
        self._prompt_logprobs_told = False
        self.done = False

    def accept(self, message: Tokens) -> Tokens | None:
        """The news in a message, None where there is none.

        Raises TriptychError("internal_error") for a sequence that nobody asked for, and where tokens are missing.
        """
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
            return message  # all of it is news, as usual
        return msgspec.structs.replace(
            message,
            offset=have,
            token_ids=fresh,
            finish_reason=message.finish_reason if ends else None,
            logprobs=message.logprobs[have - message.offset :],
            prompt_logprobs=[] if repeats_prompt else message.prompt_logprobs,
        )

    def close(self, enough: Set[int] = frozenset()) -> list[Tokens]:
        """After a loss: the last words of sequences that are complete but for them. `done` if nothing is left of those
        that are not in `enough`."""
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
        """The sequences that are not complete; nobody waits for those in `enough`."""
        return [i for i, sequence in enumerate(self._sequences) if not sequence.finished and i not in enough]

    def resumed(self, enough: Set[int]) -> list[Resumed]:
        """What another instance needs to know to go on with the rest. Empty: the whole request starts again.

        So do beams, of which nothing is told before the end.
        """
        begun = any(sequence.token_ids or sequence.finished for sequence in self._sequences)
        if self._sampling.uses_beams or not begun:
            return []
        return [Resumed(index, list(self._sequences[index].token_ids)) for index in self.rest(enough)]
