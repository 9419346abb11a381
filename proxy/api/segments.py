"""Segments from Whisper's timestamp tokens, and subtitles from segments.

<|0.00|> Hello there. <|2.40|><|2.80|> How are you? <|5.00|>      one window of at most 30 s
|--- segment 0 -------------||--- segment 1 -------------|        times count from the start of the window
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.sampling_params import TimestampRules
from common.text.whisper_rules import compression_ratio

TIMESTAMP_S: Final = 0.02
"""Seconds between consecutive timestamp tokens."""


@dataclass(frozen=True)
class Segment:
    """Part of a transcript. `token_ids` include timestamps; `seek_s` is the start of the window."""

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    seek_s: float
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    temperature: float = 0.0

    def to_json(self, index: int) -> dict[str, Any]:
        """Return OpenAI's `verbose_json`: times in seconds, `seek` in hundredths."""
        known = {"avg_logprob": self.avg_logprob, "no_speech_prob": self.no_speech_prob}
        return {
            "id": index,
            "seek": round(self.seek_s * 100),
            "start": round(self.start_s, 3),
            "end": round(self.end_s, 3),
            "text": self.text,
            "tokens": list(self.token_ids),
            "temperature": self.temperature,
            "compression_ratio": compression_ratio(self.text),
            **{name: value for name, value in known.items() if value is not None},
        }


def split_at_timestamps(
    token_ids: Sequence[int],
    rules: TimestampRules | None,
    window_s: tuple[float, float],
    decode: Callable[[Sequence[int]], str],
) -> list[Segment]:
    """Return the segments of a window, from `window_s[0]` to `window_s[1]` of the recording.

    Text without timestamps begins and ends with the window; no segment ends later. Empty segments are left out.
    """
    begin_s, end_s = window_s
    segments: list[Segment] = []
    held: list[int] = []
    start_s = begin_s

    def close(until_s: float) -> None:
        text = decode([token for token in held if rules is None or token < rules.first_token_id])
        if text.strip():
            segments.append(Segment(start_s, max(start_s, until_s), text, tuple(held), begin_s))

    for token in token_ids:
        if rules is None or token < rules.first_token_id:
            held.append(token)
            continue
        time_s = min(begin_s + (token - rules.first_token_id) * TIMESTAMP_S, end_s)
        if any(other < rules.first_token_id for other in held):
            held.append(token)
            close(time_s)
            held = []
        else:
            held = [token]
        start_s = time_s
    close(end_s)
    return segments


def as_srt(segments: Iterable[Segment]) -> str:
    """SubRip: numbered cues with commas before the milliseconds."""
    return "\n".join(f"{number}\n{_cue(one, ',', hours=True)}" for number, one in enumerate(segments, 1))


def as_vtt(segments: Iterable[Segment]) -> str:
    """WebVTT: hours only from the first hour on."""
    return "\n".join(["WEBVTT\n", *(_cue(one, ".") for one in segments)])


def _cue(segment: Segment, point: str, *, hours: bool = False) -> str:
    """Return times and text of a cue; an arrow in the text would start a new cue."""
    text = segment.text.strip().replace("-->", "->")
    return f"{_clock(segment.start_s, point, hours=hours)} --> {_clock(segment.end_s, point, hours=hours)}\n{text}\n"


def _clock(seconds: float, point: str, *, hours: bool = False) -> str:
    milliseconds = math.floor(seconds * 1000 + 0.5)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    whole, milliseconds = divmod(milliseconds, 1000)
    hour, minutes = divmod(minutes, 60)
    prefix = f"{hour:02d}:" if hours or hour else ""
    return f"{prefix}{minutes:02d}:{whole:02d}{point}{milliseconds:03d}"
