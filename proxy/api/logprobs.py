"""Log-probabilities in the shapes of OpenAI's API: chat's, text completion's, and vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from broker.cluster.rpc import MAX_FROM_WORKER_BYTES
from common.errors import invalid
from common.messages import TokenLogprob, encode
from common.text.token_text import TokenTexts

MIN_LOGPROB: Final = -9999.0
"""Log-probability of impossible tokens: JSON has no infinity."""
_REST_BYTES: Final = 256 * 2**10
"""Memory for the rest of a message with log-probabilities of a prompt: a token, spans."""


@dataclass(frozen=True)
class LogprobShapes:
    """Log-probabilities as JSON, with the `num_top` likeliest tokens per position.

    With `as_ids`, tokens are named `token_id:N` instead of by text.
    """

    texts: TokenTexts
    num_top: int
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.texts.string_of(token_id)

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return `logprobs` of a choice of /v1/chat/completions: an entry per generated token."""
        content = []
        for entry in entries:
            top = [self._chat_token(token, logprob) for token, logprob in entry.top[: self.num_top]]
            content.append({**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token_id), "logprob": _finite(logprob), "bytes": [*self.texts.bytes_of(token_id)]}

    def prompt(self, entries: Sequence[TokenLogprob | None]) -> list[msgspec.Raw | None]:
        """Return `prompt_logprobs` as JSON: per token of the prompt, log-probabilities by token id; None for the first.
        Objects of 47,000 tokens would take several hundred megabytes."""
        return [None if one is None else msgspec.Raw(msgspec.json.encode(self._by_id(one))) for one in entries]

    def _by_id(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        ranked |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.texts.string_of(token)}
            for token, (logprob, rank) in ranked.items()
        }


@dataclass
class CompletionLogprobs:
    """`logprobs` of a choice of /v1/completions, in parts: `text_offset` counts characters from the choice's start."""

    shapes: LogprobShapes
    _offset: int = 0
    _characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the fields for the next tokens of the choice."""
        return self.add_prompt([entry.token_id for entry in entries], entries)

    def add_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], text: str | None = None
    ) -> dict[str, Any]:
        """Return the fields for tokens of a prompt, the first of which has no entry. The `text` of an echo may lack
        special tokens around it, and the space before its first word."""
        offsets = []
        for token_id in token_ids:
            piece = self._characters.decode(own := self.shapes.texts.bytes_of(token_id))
            before = len(piece) - len(codecs.utf_8_decode(own, "replace")[0])  # half a character that stays one
            offsets.append(self._offset + max(0, before))
            if text is not None and not text.startswith(piece, self._offset):
                if token_id in self.shapes.texts.added:
                    continue
                piece = piece if self._offset else piece.lstrip(" ")
            self._offset += len(piece)
        if text is not None:
            self._offset = len(text)
        return {
            "tokens": [self.shapes.name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and the chosen token. Of tokens with equal text, the likelier counts."""
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self.shapes.num_top], (entry.token_id, entry.logprob)]:
            top.setdefault(self.shapes.name(token_id), _finite(logprob))
        return top


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def check_prompt_logprobs(count: int, num_prompt_tokens: int, field: str = "prompt_logprobs") -> None:
    """Raise TriptychError("invalid_request") for more log-probabilities of a prompt than fit into one message.

    `count` is the number of likeliest tokens at each token, as the request's `field` has it.
    """
    most = max_prompt_tokens(count)
    if num_prompt_tokens > most:
        message = f"{field} is {count} for {num_prompt_tokens} prompt tokens, with so many at most {most} are allowed"
        raise invalid(f"{message}; lower {field} or shorten the prompt", field)


def max_prompt_tokens(count: int) -> int:
    """Return the longest prompt, in tokens, with `count` likeliest tokens at each token in one message."""
    largest = TokenLogprob(2**31, -0.1, 2**31, [(2**31, -0.1)] * count)
    return (MAX_FROM_WORKER_BYTES - _REST_BYTES) // len(encode(largest))
