"""Audio for Qwen3-ASR: a log-mel spectrogram as long as the clip, in whole chunks of the encoder."""

from __future__ import annotations

from typing import Final

import numpy as np

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.audio import decode_audio
from engine.media.log_mel import LogMel, LogMelSettings
from engine.processors import Arrays, Prepared

MAX_SECONDS: Final = 600.0
"""Limit of a clip, which is decoded and transformed in one piece."""
CHUNK: Final = 100
"""Frames that the encoder computes together: 13 rows. transformers knows no other size."""
_MIN_SAMPLES: Final = 8000
"""Shorter clips are padded with silence, as in the model's own library."""


class Qwen3ASRProcessor:
    """Audio of up to ten minutes; a placeholder becomes 13 tokens per second."""

    kind = "audio"
    max_seconds = MAX_SECONDS

    def __init__(self, info: ModelInfo) -> None:
        json = info.preprocessor
        self._settings = LogMelSettings.from_json({"feature_size": 128, **json})
        self._log_mel = LogMel(self._settings)
        self._min_samples = int(json.get("min_length", _MIN_SAMPLES))
        self._token_id = int(info.config["audio_token_id"])
        self._hidden_size = int(info.text_config["hidden_size"])
        audio = info.config["audio_config"]
        if 2 * int(audio.get("n_window", 50)) != CHUNK:
            raise ValueError(f"n_window is {audio['n_window']}; only {CHUNK // 2} is supported")
        if self._settings.feature_size != int(audio.get("num_mel_bins", 128)):
            raise ValueError(
                f"the feature extractor of {info.name} makes {self._settings.feature_size} mel bins, its encoder "
                f"takes {audio.get('num_mel_bins', 128)}"
            )

    def __call__(self, media: bytes) -> Prepared:
        samples = decode_audio(media, self._settings.sampling_rate, MAX_SECONDS)
        features = self._log_mel(samples, max(len(samples), self._min_samples))
        num_frames = features.shape[1]
        padded = np.pad(features, ((0, 0), (0, -num_frames % CHUNK)))
        num_tokens = num_output_tokens(num_frames)
        mask = (np.arange(padded.shape[1]) < num_frames).astype(np.int64)
        arrays: Arrays = {"input_features": padded, "input_features_mask": mask}
        return arrays, InputLayout(num_tokens, [(self._token_id, num_tokens)]), (num_tokens, self._hidden_size)


def num_output_tokens(num_frames: int) -> int:
    """Return the encoder rows for a number of frames: three convolutions over each chunk halve their number, each."""
    chunks, rest = divmod(num_frames, CHUNK)
    return chunks * -(-CHUNK // 8) + -(-rest // 8)
