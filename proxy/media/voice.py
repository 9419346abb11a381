"""Voice activity by energy: a pause is quieter than speech, and steady noise has no speech in it.

dB        ___        ____ _
-30   ___/   \\_     /    V \\___
-60 _/        \\____/           \\______    floor: the tenth percentile
      |==== region ====|                  padded, joined over short pauses
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_SMOOTHED_HOPS: Final = 5
_LEAST_DB: Final = -60.0
"""Of full scale: quieter sound is silence, whatever surrounds it."""
_STEADY_DB: Final = 6.0
"""Range below which a recording is steady noise."""
_DB_PER_THRESHOLD: Final = 18.0
_LEAST_S: Final = 0.1
"""Shorter bursts are clicks."""


@dataclass(frozen=True)
class VoiceOptions:
    """A higher `threshold` (0 to 1) wants louder speech; regions get `padding_s` on both sides, and go on over pauses
    of up to `silence_s`. Defaults as in faster-whisper."""

    threshold: float = 0.5
    padding_s: float = 0.4
    silence_s: float = 2.0


def regions(energies: npt.NDArray[np.float32], hops_per_s: int, options: VoiceOptions) -> list[tuple[int, int]]:
    """Return where speech may be, as ranges of hops in order, from the mean square of every hop."""
    if len(energies) < _SMOOTHED_HOPS:
        return []
    smoothed = np.convolve(energies, np.full(_SMOOTHED_HOPS, 1 / _SMOOTHED_HOPS), mode="same")
    level = 10 * np.log10(smoothed + 1e-12)
    floor, peak = float(np.percentile(level, 10)), float(level.max())
    if peak < _LEAST_DB or (peak - floor < _STEADY_DB and len(level) > 2 * hops_per_s):
        return []
    margin = _DB_PER_THRESHOLD * options.threshold
    is_loud = level > max(_LEAST_DB, min(floor + margin, peak - margin))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_loud, [False]]).astype(np.int8)))
    found: list[tuple[int, int]] = []
    padding = round(options.padding_s * hops_per_s)
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin < _LEAST_S * hops_per_s:
            continue
        if found and begin - found[-1][1] <= options.silence_s * hops_per_s:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    padded = [(max(0, begin - padding), min(len(energies), end + padding)) for begin, end in found]
    return [(max(begin, padded[index - 1][1]) if index else begin, end) for index, (begin, end) in enumerate(padded)]
