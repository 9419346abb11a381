"""How the next token is chosen: the settings of one request."""

from __future__ import annotations

from typing import Final

import msgspec

from common.errors import TriptychError

MIN_TEMPERATURE: Final = 1e-5
"""Below this, dividing logits by the temperature overflows: it means greedy."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one request; the names and meanings are those of vLLM and OpenAI.

    `stop` strings are applied by whoever faces the user (`LLM`, the proxy); everything else by the worker.
    `prefix_allowed[i]`, if given, lists the only token ids allowed as the i-th generated token: forced tokens are
    lists of one, Whisper's language detection is the list of its language tokens.
    `suppress_tokens` never appear; `begin_suppress_tokens` do not appear as the first token after the prefix.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    prefix_allowed: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    def validate(self) -> SamplingParams:
        """Return self, or raise TriptychError("invalid_request") naming the field and the value."""
        checks = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must be between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or positive"),
            ("stop", len(self.stop) <= 16 and all(self.stop), "takes at most 16 non-empty strings"),
        )
        for name, good, rule in checks:
            if not good:
                raise TriptychError("invalid_request", f"{name} {rule}, not {getattr(self, name)!r}", name)
        return self
