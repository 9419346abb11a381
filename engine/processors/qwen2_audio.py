"""Audio for Qwen2-Audio: log-mel spectrograms of a window, and the length of the audio within."""

from __future__ import annotations

import numpy as np

from common.errors import TriptychError
from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.audio import decode_audio
from engine.media.log_mel import LogMel, LogMelSettings
from engine.processors import Arrays, Prepared


class Qwen2AudioProcessor:
    """Audio of at most a window (30 s); a placeholder becomes a token per four frames (40 ms)."""

    kind = "audio"

    def __init__(self, info: ModelInfo) -> None:
        self._settings = LogMelSettings.from_json(info.preprocessor)
        self.max_seconds = float(self._settings.chunk_length)
        self._log_mel = LogMel(self._settings)
        self._token_id = info.placeholder_token_id or 0
        self._hidden_size = int(info.text_config["hidden_size"])
        audio = info.config["audio_config"]
        ours = (self._settings.feature_size, self._settings.num_frames)
        # Its convolutions halve the frames.
        tower = (int(audio.get("num_mel_bins", 128)), 2 * int(audio.get("max_source_positions", 1500)))
        if ours != tower:
            raise ValueError(
                f"the feature extractor of {info.name} makes {ours[0]} mel bins of {ours[1]} frames, "
                f"its encoder takes {tower[0]} of {tower[1]}"
            )

    def __call__(self, media: bytes) -> Prepared:
        settings = self._settings
        samples = decode_audio(media, settings.sampling_rate, self.max_seconds)
        num_frames = min(-(-len(samples) // settings.hop_length), settings.num_frames)
        num_tokens = num_output_tokens(num_frames)
        if num_tokens < 1:
            seconds, frame_s = len(samples) / settings.sampling_rate, settings.hop_length / settings.sampling_rate
            message = f"the clip is {seconds:.3f} s long; it must be longer than {2 * frame_s:g} s"
            raise TriptychError("bad_media", message)
        mask = (np.arange(settings.num_frames) < num_frames).astype(np.int64)
        arrays: Arrays = {"input_features": self._log_mel(samples), "feature_attention_mask": mask}
        return arrays, InputLayout(num_tokens, [(self._token_id, num_tokens)], None), (num_tokens, self._hidden_size)


def num_output_tokens(num_frames: int) -> int:
    """Return the encoder rows for a number of frames: convolution and pooling halve the number, each.

    0 for audio of less than three frames.
    """
    return max(((num_frames - 1) // 2 + 1) // 2, 0)
