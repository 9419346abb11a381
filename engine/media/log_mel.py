"""Audio to Whisper's log-mel spectrogram, bit for bit as by transformers' feature extractor.

Written here because transformers' own costs seconds of imports in every preprocessing process; torch stays, because
another Fourier transform rounds otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_HERTZ = 8000.0
_LINEAR_MELS, _LINEAR_HERTZ = 15.0, 1000.0
"""Slaney's mel scale: linear below these, logarithmic above."""


@dataclass(frozen=True)
class LogMelSettings:
    """Mel bins, Hz and seconds; `hop_length` and `n_fft` are in samples."""

    feature_size: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    chunk_length: int = 30
    n_fft: int = 400

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> LogMelSettings:
        """From a preprocessor_config.json. Raises ValueError for random dither, and padding but with zeros behind."""
        for name, supported in (("dither", 0.0), ("padding_side", "right"), ("padding_value", 0.0)):
            if json.get(name, supported) != supported:
                raise ValueError(
                    f"a feature extractor with {name} = {json[name]} is not supported; only {supported} is"
                )
        return cls(**{name: json[name] for name in cls.__dataclass_fields__ if json.get(name) is not None})

    @property
    def num_samples(self) -> int:
        return self.chunk_length * self.sampling_rate

    @property
    def num_frames(self) -> int:
        return self.num_samples // self.hop_length


class LogMel:
    """Mono samples to [feature_size, num_frames], padded with silence to a chunk or to a given number of samples."""

    def __init__(self, settings: LogMelSettings) -> None:
        import torch

        self.settings = settings
        self._torch = torch
        self._window = torch.hann_window(settings.n_fft)
        self._filters = torch.from_numpy(mel_filters(settings)).to(torch.float32)

    def __call__(self, samples: npt.NDArray[np.float32], num_samples: int | None = None) -> npt.NDArray[np.float32]:
        torch, settings = self._torch, self.settings
        waveform = torch.zeros(1, num_samples or settings.num_samples)
        waveform[0, : len(samples)] = torch.from_numpy(samples[: waveform.shape[1]])
        spectrum = torch.stft(waveform, settings.n_fft, settings.hop_length, window=self._window, return_complex=True)
        power = (spectrum[..., :-1].abs() ** 2).contiguous()
        log_mel = torch.clamp(self._filters.T @ power, min=1e-10).log10()[0]
        log_mel = (torch.maximum(log_mel, log_mel.max() - 8.0) + 4.0) / 4.0
        features: npt.NDArray[np.float32] = log_mel.numpy()
        return features


def mel_filters(settings: LogMelSettings) -> npt.NDArray[np.float64]:
    """[n_fft / 2 + 1, feature_size]: triangles of equal area, evenly spaced on Slaney's mel scale up to 8 kHz."""
    num_bins, num_mels = 1 + settings.n_fft // 2, settings.feature_size
    corners = _hertz(np.linspace(0.0, _mels(_MAX_HERTZ), num_mels + 2))
    bins = np.linspace(0, settings.sampling_rate // 2, num_bins)
    widths = np.diff(corners)
    slopes = corners[None, :] - bins[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    filters: npt.NDArray[np.float64] = triangles * (2.0 / (corners[2:] - corners[:-2]))
    return filters


def _mels(hertz: float) -> float:
    """Of a frequency in the logarithmic part."""
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HERTZ) * (27.0 / np.log(6.4)))


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    hertz = 200.0 * mels / 3.0
    above = mels >= _LINEAR_MELS
    hertz[above] = _LINEAR_HERTZ * np.exp(np.log(6.4) / 27.0 * (mels[above] - _LINEAR_MELS))
    return hertz
