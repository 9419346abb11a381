"""Log-probabilities of a prompt whose prefill runs apart: they come from there, and belong to the first tokens."""

from __future__ import annotations

import msgspec

from common.messages import TokenLogprob, Tokens


class PromptLogprobs:
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
