"""Log-probabilities of a prompt whose prefill runs apart: they come from there, and belong to the first tokens."""

from __future__ import annotations

from typing import Final

import msgspec

from broker.cluster.rpc import MAX_FROM_WORKER_BYTES
from common.errors import TriptychError
from common.messages import TokenLogprob, Tokens, encode

_REST_BYTES: Final = 256 * 2**10
"""Room for what else is in the message that brings them: a token, spans."""


class RemotePromptLogprobs:
    """Holds the tokens of a job back until the log-probabilities of its prompt are there, where they are wanted."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._known: list[TokenLogprob | None] = []
        self._held: list[Tokens] | None = None

    @property
    def withheld(self) -> bool:
        """Whether tokens have come that nobody has been told of."""
        return bool(self._held)

    def start(self, *, apart: bool) -> None:
        """The job begins, again perhaps: what was held back comes once more."""
        self._held = [] if apart and self._wanted else None

    def tokens(self, message: Tokens) -> list[Tokens]:
        """What may be told now that these have come."""
        if self._held is not None:
            self._held.append(message)
            return []
        if self._known:
            message = msgspec.structs.replace(message, prompt_logprobs=self._known)
            self._known = []
        self._wanted = self._wanted and not message.prompt_logprobs
        return [message]

    def prefilled(self, logprobs: list[TokenLogprob | None]) -> list[Tokens]:
        """What may be told now that the prompt has been computed."""
        if self._held is None:
            return []
        held, self._held, self._known = self._held, None, logprobs
        return [told for message in held for told in self.tokens(message)]


def check_prompt_logprobs(count: int | None, num_prompt_tokens: int, field: str = "prompt_logprobs") -> None:
    """Raises TriptychError("invalid_request") naming `field` where the `count` likeliest tokens at each token of a
    prompt are more than a worker can tell: they come in one message."""
    if count is None:
        return
    most = max_prompt_tokens(count)
    if num_prompt_tokens > most:
        message = f"{field} is {count} for {num_prompt_tokens} prompt tokens, with so many at most {most} are allowed"
        raise TriptychError("invalid_request", f"{message}; lower {field} or shorten the prompt", field)


def max_prompt_tokens(count: int) -> int:
    """The longest prompt of which the `count` likeliest tokens at each token can be told, in tokens."""
    largest = TokenLogprob(2**31, -0.1, 2**31, [(2**31, -0.1)] * count)
    return (MAX_FROM_WORKER_BYTES - _REST_BYTES) // len(encode(largest))
