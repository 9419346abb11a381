"""Audio for Whisper: log-mel spectrograms of a window."""

from __future__ import annotations

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.audio import decode_audio
from engine.media.log_mel import LogMel, LogMelSettings
from engine.processors import Prepared


class WhisperProcessor:
    """Audio of at most a window (30 s) to a log-mel spectrogram, padded to the window."""

    kind = "audio"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = LogMelSettings.from_json(info.preprocessor)
        self.max_seconds = float(self._settings.chunk_length)
        self._log_mel = LogMel(self._settings)
        self._shape = (int(info.config["max_source_positions"]), int(info.config["d_model"]))
        num_frames = self._settings.num_frames
        if num_frames != 2 * self._shape[0]:  # its convolutions halve the frames
            raise ValueError(
                f"the feature extractor of {info.name} makes {num_frames} frames, "
                f"its encoder takes {2 * self._shape[0]}"
            )

    def __call__(self, media: bytes) -> Prepared:
        samples = decode_audio(media, self._settings.sampling_rate, self.max_seconds)
        return {"input_features": self._log_mel(samples)}, InputLayout(self._shape[0], [], None), self._shape
