"""Live audio: when somebody speaks, and which words are sure before the end."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from proxy.media.voice import VoiceOptions, regions

RATE: Final = 24_000
BYTES_PER_S: Final = 2 * RATE
STEP_BYTES: Final = BYTES_PER_S // 10
LONGEST_TURN_S: Final = 30
_CUT_S: Final = 5
"""In the last seconds of the longest turn any short pause ends it."""
_SHORT_PAUSE_S: Final = 0.1
_HOPS_PER_S: Final = 50
_HOP_BYTES: Final = BYTES_PER_S // _HOPS_PER_S
_LEAST_HOPS: Final = 10
"""Shorter sounds are no speech."""
_ONSET_BYTES: Final = BYTES_PER_S
"""Audio in which the begin of speech has been noticed."""
_WORD: Final = re.compile(r"\s*(?:[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+)")
"""Kana and Chinese characters are words, each."""


@dataclass
class LiveAudio:
    """Uncommitted audio (16-bit mono) up to byte `end` of a session; without `voice` no turns are found in it."""

    voice: VoiceOptions | None
    audio: bytearray = field(default_factory=bytearray)
    end: int = 0
    speaks: bool = False
    _energies: deque[float] = field(default_factory=lambda: deque(maxlen=LONGEST_TURN_S * _HOPS_PER_S))
    _num_hops: int = 0
    _taken_hops: int = 0

    @property
    def start(self) -> int:
        return self.end - len(self.audio)

    def take(self) -> bytes:
        """Remove and return all audio."""
        taken, self.audio, self.speaks = bytes(self.audio), bytearray(), False
        self._taken_hops = self.end // _HOP_BYTES
        return taken

    def hear(self, pcm: bytes) -> Literal["started", "stopped"] | None:
        """Add at most STEP_BYTES. Return whether a turn has begun or ended by them."""
        self.audio += pcm
        self.end += len(pcm)
        if self.voice is None:
            self._num_hops = self.end // _HOP_BYTES
            return None
        while (self._num_hops + 1) * _HOP_BYTES <= self.end:
            begin = max(0, self._num_hops * _HOP_BYTES - self.start)
            samples = np.frombuffer(bytes(self.audio[begin : begin + _HOP_BYTES]), "<i2") / 2**15
            self._energies.append(float(np.square(samples).mean()) if len(samples) else 0.0)
            self._num_hops += 1
        return self._turn(self.voice)

    def _turn(self, voice: VoiceOptions) -> Literal["started", "stopped"] | None:
        size_s = len(self.audio) / BYTES_PER_S
        pause_s = _SHORT_PAUSE_S if self.speaks and size_s > LONGEST_TURN_S - _CUT_S else voice.silence_s
        energies = np.array(self._energies, np.float32)
        found = regions(energies, _HOPS_PER_S, replace(voice, padding_s=0.0, silence_s=pause_s))
        first = self._num_hops - len(energies)
        begin, end = (first + hop for hop in found[-1]) if found else (0, 0)
        begin, was_speaking = max(begin, self._taken_hops), self.speaks
        self.speaks = bool(found) and self._num_hops - end < pause_s * _HOPS_PER_S
        if was_speaking:
            self.speaks = self.speaks and size_s < LONGEST_TURN_S
            return None if self.speaks else "stopped"
        self.speaks = self.speaks and end - begin >= _LEAST_HOPS
        keep_from = begin * _HOP_BYTES if self.speaks else self.end - _ONSET_BYTES
        padding = round(voice.padding_s * _HOPS_PER_S) * _HOP_BYTES
        del self.audio[: max(0, keep_from - padding - self.start)]
        return "started" if self.speaks else None


@dataclass
class Agreement:
    """The words of a segment that are told early: two successive transcriptions of the growing segment have them.

    LocalAgreement-2 of Macháček, Dabre and Bojar (2023). Case and punctuation do not count; no word is taken back.
    """

    _num_told: int = 0
    _last: list[str] = field(default_factory=list)

    def push(self, text: str) -> str:
        """Take the next transcription. Return the words to tell now, with their spaces."""
        heard, last, begin = _WORD.findall(text), self._last, self._num_told
        while self._num_told < min(len(heard), len(last)) and _same(heard[self._num_told], last[self._num_told]):
            self._num_told += 1
        self._last = heard
        return "".join(heard[begin : self._num_told])

    def rest(self, text: str) -> str:
        """Return the untold words of the transcription of the whole segment."""
        return "".join(_WORD.findall(text)[self._num_told :])


def _same(*words: str) -> bool:
    return len({re.sub(r"\W", "", word).casefold() or word.strip() for word in words}) == 1
