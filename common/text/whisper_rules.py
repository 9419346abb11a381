"""Whisper's rules against invented text: two thresholds tell silence, bad text is read again at other temperatures.

Thresholds and their defaults are those of openai-whisper's `transcribe` (Radford et al., 2022, section 4.5).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Rules:
    """When a window is silence, and when its text is bad. Unknown probabilities are not held against a window."""

    no_speech_threshold: float = 0.6
    log_prob_threshold: float = -1.0
    compression_ratio_threshold: float = 2.4
    temperatures: tuple[float, ...] = TEMPERATURES

    def is_silence(self, no_speech_prob: float | None, avg_logprob: float | None) -> bool:
        """Whether silence is likely, and the text is not."""
        likely = no_speech_prob is not None and no_speech_prob > self.no_speech_threshold
        return likely and (avg_logprob is None or avg_logprob <= self.log_prob_threshold)

    def quality(self, text: str, avg_logprob: float | None) -> tuple[bool, float]:
        """Return whether a text varies, and how likely it is: good from (True, log_prob_threshold) on."""
        return compression_ratio(text) <= self.compression_ratio_threshold, avg_logprob or 0.0


def compression_ratio(text: str) -> float:
    """Return how many times shorter a text is when packed: repetition packs well."""
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))
