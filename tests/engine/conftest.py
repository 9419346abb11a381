"""Small random checkpoints for tests that drive an engine; a file may have its own of the same name."""

import pytest

from common.model_info import ModelInfo, load_model_info
from tests import tiny_models
from tests.tiny import encdec, mllama, qwen

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


@pytest.fixture(scope="session")
def tiny_qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(qwen.make_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))))


@pytest.fixture(scope="session")
def tiny_mllama(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(mllama.make_mllama(tmp_path_factory.mktemp("mllama"))))


@pytest.fixture(scope="session")
def tiny_bart(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(encdec.make_bart(tmp_path_factory.mktemp("bart"))))


@pytest.fixture(scope="session")
def tiny_t5(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return load_model_info(str(encdec.make_t5(tmp_path_factory.mktemp("t5"))))
