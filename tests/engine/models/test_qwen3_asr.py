"""Qwen3-ASR: spectrograms and encoder outputs of clips of any length are transformers', alone and in a batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths as theirs

from common.errors import TriptychError
from common.model_info import load_model_info
from engine import processors
from engine.processors import ProcessedInput
from engine.processors.qwen3_asr import Qwen3ASRProcessor, num_output_tokens
from tests.engine.models.dense import decoder_of, edit_json
from tests.engine.models.encoders import assert_bfloat16_close, assert_outputs_equal
from tests.media_files import sound_file
from tests.tiny.qwen import make_qwen3_asr

SECONDS = (0.1, 0.5, 0.8001, 3.3, 7.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_asr(tmp_path_factory.mktemp("asr") / "model")


def noise(seconds: float) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(round(seconds * 1000))
    return rng.normal(0, 0.1, round(16000 * seconds)).astype(np.float32)


def clips(folder: Path, dtype: str = "float32") -> list[ProcessedInput]:
    processors.init_worker(str(folder), dtype)
    return [processors.process("audio", sound_file(noise(seconds), subtype="FLOAT")) for seconds in SECONDS]


def test_the_head_is_the_embedding_where_config_json_does_not_say(folder: Path, tmp_path: Path) -> None:
    silent = Path(shutil.copytree(folder, tmp_path / "silent"))
    edit_json(silent / "config.json", lambda config: {k: v for k, v in config.items() if k != "tie_word_embeddings"})
    assert Qwen3ASRForConditionalGeneration.from_pretrained(silent).config.tie_word_embeddings
    assert decoder_of(silent).lm_head is None


def test_clips_are_processed_as_by_transformers(folder: Path) -> None:
    extract = AutoFeatureExtractor.from_pretrained(folder)
    for item, seconds in zip(clips(folder), SECONDS, strict=True):
        options = {"padding": "longest", "return_attention_mask": True, "return_tensors": "np"}
        expected = extract(noise(seconds), sampling_rate=16000, **options)
        assert np.array_equal(item.arrays["input_features"], expected["input_features"][0])
        assert np.array_equal(item.arrays["input_features_mask"], expected["attention_mask"][0])
        assert item.layout.expansion == [(261, item.shape[0])]


def test_clips_have_as_many_tokens_as_transformers_makes() -> None:
    frames = torch.arange(1, 1001)
    assert [num_output_tokens(count) for count in frames.tolist()] == theirs(frames).tolist()


def test_encoder_outputs_equal_transformers(folder: Path) -> None:
    reference: Any = Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def expected(item: ProcessedInput) -> Tensor:
        arrays = {name: torch.from_numpy(array)[None] for name, array in item.arrays.items()}
        features: Tensor = reference.model.get_audio_features(**arrays).pooler_output
        return features

    assert_outputs_equal(folder, clips(folder), expected, atol=1e-4)
    assert_bfloat16_close(folder, clips(folder, "bfloat16"))


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.processors.qwen3_asr.MAX_SECONDS", 2.0)
    with pytest.raises(TriptychError, match="at most 2 s are accepted"):
        Qwen3ASRProcessor(load_model_info(str(folder)))(sound_file(noise(3.3)))
    other = make_qwen3_asr(tmp_path / "model")
    edit_json(other / "preprocessor_config.json", lambda json: {**json, "feature_size": 80})
    with pytest.raises(ValueError, match="makes 80 mel bins, its encoder takes 40"):
        Qwen3ASRProcessor(load_model_info(str(other)))
    audio = {"num_mel_bins": 80, "n_window": 20}
    edit_json(other / "config.json", lambda json: {**json, "audio_config": {**json["audio_config"], **audio}})
    with pytest.raises(ValueError, match="n_window is 20; only 50 is supported"):
        Qwen3ASRProcessor(load_model_info(str(other)))
