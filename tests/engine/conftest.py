"""Small random checkpoints for tests that drive an engine; a file may have its own of the same name."""

import pytest

from common.model_info import ModelInfo, load_model_info
from tests import tiny_models

AUDIO_FRAMES = 18
"""Of the tiny Whisper here: short cross tables leave room to see what happens to them."""


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(tiny_models.make_llama(tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(tiny_models.make_qwen2_5_vl(tmp_path_factory.mktemp("vision"))))


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tiny_models.make_whisper(tmp_path_factory.mktemp("speech"), max_source_positions=AUDIO_FRAMES)
    return load_model_info(str(folder))
