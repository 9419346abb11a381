"""Limits on the header of a sound, wherever the sound is decoded."""

from __future__ import annotations

from typing import Final

SAMPLING_RATES: Final = (1_000, 400_000)
"""Lowest and highest sampling rate in Hz: the header of a file could claim any number."""
MAX_CHANNELS: Final = 8
