"""Books of one job: delivered tokens by sequence, failures and waits of its work, deadlines.

Repeated tokens are discarded, gaps are errors, the rest of a job can be resumed elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from typing import Final

import msgspec

from common.errors import ErrorInfo, TriptychError
from common.messages import Resumed, TokenLogprob, Tokens
from common.sampling_params import SamplingParams

MAX_FAILURES: Final = 3
"""Failures in a row after which the work is given up."""
MAX_WAITS: Final = 10
"""Waits in a row that ended early without memory or result."""
BACKOFF_S: Final = 0.25
"""Pause before a second attempt on the same instances, doubled before a third. Another instance is asked at once."""

Action = Callable[[], None]


@dataclass
class _DeliveredSequence:
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


class Progress:
    """The delivered tokens by sequence. `done` once the job's last message was accepted.

    Log-probabilities of a prompt that another worker computes come from that worker, and belong to the first tokens.
    Tokens that come earlier are withheld until then.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._sequences = [_DeliveredSequence() for _ in range(sampling.n)]
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._prompt_logprobs_delivered = False
        self._withheld: list[Tokens] | None = None  # None: tokens are delivered at once
        self.done = False

    @property
    def withholds(self) -> bool:
        """Whether some tokens are not delivered yet."""
        return bool(self._withheld)

    def start(self, enough: Set[int], *, prefilled: bool) -> list[Resumed]:
        """Begin on a decoder whose prompt is `prefilled` elsewhere or not; tokens withheld before come again.

        Returns the state from which the decoder continues the sequences outside of `enough`. Empty: the whole request
        starts again, as beam search always does, because none of its tokens is delivered before the end.
        """
        wanted = self._sampling.prompt_logprobs is not None and not self._prompt_logprobs_delivered
        self._withheld = [] if prefilled and wanted else None
        begun = any(sequence.token_ids or sequence.finished for sequence in self._sequences)
        if self._sampling.uses_beams or not begun:
            return []
        return [Resumed(index, list(self._sequences[index].token_ids)) for index in self.rest(enough)]

    def prefilled(self, logprobs: list[TokenLogprob | None]) -> list[Tokens]:
        """Return the withheld messages, to be accepted now, with the log-probabilities of the computed prompt."""
        if self._withheld is None:
            return []
        messages, self._withheld, self._prompt_logprobs = self._withheld, None, logprobs
        return messages

    def accept(self, message: Tokens, enough: Set[int] = frozenset()) -> Tokens | None:
        """Return the news in a message; None for an old or withheld message.

        Raises TriptychError: "unavailable" for missing tokens, or for the missing end of a sequence outside of
        `enough`; "internal_error" for an unknown sequence.
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
            raise TriptychError("unavailable", text)
        missing = self.rest(enough | {message.index}) if message.done else []
        if missing and not (self._sampling.uses_beams and missing[0] > message.index):  # beams may be fewer than `n`
            raise TriptychError("unavailable", f"the end of sequence {missing[0]} was lost on the way")
        fresh = message.token_ids[have - message.offset :]
        ends = message.finish_reason is not None and not sequence.finished
        sequence.token_ids += fresh
        sequence.finished = sequence.finished or ends
        self.done = self.done or message.done
        if not (fresh or ends or message.done):
            return None
        repeats_prompt = bool(message.prompt_logprobs) and self._prompt_logprobs_delivered
        self._prompt_logprobs_delivered = self._prompt_logprobs_delivered or bool(message.prompt_logprobs)
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
        """Return the incomplete sequences without those in `enough`."""
        return [i for i, sequence in enumerate(self._sequences) if not sequence.finished and i not in enough]


def joined(news: list[Tokens]) -> list[Tokens]:
    """Return one message for each sequence, in place of its next ones."""
    pieces: defaultdict[int, list[Tokens]] = defaultdict(list)
    for tokens in news:
        pieces[tokens.index].append(tokens)
    return [
        msgspec.structs.replace(
            own[-1],
            offset=own[0].offset,
            token_ids=[token for piece in own for token in piece.token_ids],
            finish_reason=next((piece.finish_reason for piece in own if piece.finish_reason is not None), None),
            logprobs=[entry for piece in own for entry in piece.logprobs],
            prompt_logprobs=own[0].prompt_logprobs,
        )
        for own in pieces.values()
    ]


@dataclass
class Deadlines:
    """All deadlines of one job, each with the action that follows. Times are by `time.monotonic`.

    `wake` is called with an action once its deadline is due. The job runs it behind the events that came before, and
    it does nothing where one of these has changed the deadline.
    """

    wake: Callable[[Action], None]
    _timers: dict[Hashable, asyncio.TimerHandle] = field(default_factory=dict)
    _early: dict[Hashable, Action] = field(default_factory=dict)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._timers

    def set(self, key: Hashable, due_s: float, action: Action, *, early: bool = False) -> None:
        """Run `action` at `due_s`, or `early` by `hasten`, in place of any earlier deadline of `key`."""

        def run() -> None:
            if self._timers.get(key) is timer:  # not changed since it was due
                self.clear(key)
                action()

        self.clear(key)
        timer = self._timers[key] = asyncio.get_running_loop().call_at(due_s, self.wake, run)
        if early:
            self._early[key] = run

    def hasten(self) -> None:
        """Run now what may run early."""
        for run in list(self._early.values()):
            run()

    def clear(self, key: Hashable) -> None:
        """Forget the deadline of `key`, if any."""
        self._early.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def stop(self) -> None:
        """Forget all deadlines."""
        for key in list(self._timers):
            self.clear(key)


@dataclass
class Retries:
    """Failures and waits in a row for a piece of work, named `what` in errors, with the field `param`."""

    what: str
    param: str | None = None
    failures: int = 0
    waits: int = 0
    failed_on: set[str] = field(default_factory=set)
    """Instances that failed, or could not deliver, since the last success."""

    @property
    def backoff_s(self) -> float:
        """Pause before instances that have just failed are asked again."""
        return BACKOFF_S * 2.0 ** max(0, self.failures - 1)

    def failed(self, instance_id: str, error: ErrorInfo) -> None:
        """Count a failure. Raises `error` in other words after MAX_FAILURES."""
        self.failures += 1
        self.failed_on.add(instance_id)
        if self.failures >= MAX_FAILURES:
            raise self._given_up(self.failures, error)

    def waited(self, error: ErrorInfo, *, in_full: bool = False, undelivered_by: str | None = None) -> None:
        """Count a wait in vain. Raises `error` in other words after MAX_WAITS.

        `undelivered_by` is an instance that could not deliver its result: another instance may have a working route.
        A wait `in_full`, as long as planned, does not count: a burst is no failure and must drain.
        """
        if undelivered_by is not None:
            self.failed_on.add(undelivered_by)
        self.waits = 0 if in_full else self.waits + 1
        if self.waits >= MAX_WAITS:
            raise self._given_up(self.waits, error)

    def succeeded(self) -> None:
        """Count anew: work that succeeded once may be needed again later."""
        self.failures, self.waits = 0, 0
        self.failed_on.clear()

    def _given_up(self, times: int, last: ErrorInfo) -> TriptychError:
        return TriptychError(last.code, f"{self.what} in {times} attempts; the last: {last.message}", self.param)
