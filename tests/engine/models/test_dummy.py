"""Random weights instead of a checkpoint: no file is needed, and every process draws the same ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from engine.llm import LLM
from engine.models.registry import load_decoder, load_encoder
from tests.tiny.encdec import make_bart, make_t5
from tests.tiny.florence2 import make_florence2

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def folder(whisper: Path, tmp_path: Path) -> Path:
    """A model without its weights."""
    return shutil.copytree(whisper, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


def test_two_loads_have_the_same_weights_of_the_models_own_size(folder: Path) -> None:
    info = load_model_info(str(folder))
    (one, num_bytes), (other, _) = (load_decoder(info, CPU, torch.bfloat16, "dummy") for _ in range(2))
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    assert all(mine.dtype == torch.bfloat16 and torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)
    assert num_bytes == sum(parameter.nbytes for parameter in one.parameters())


@pytest.mark.parametrize("make", [make_bart, make_t5, make_florence2])
def test_a_model_needs_no_checkpoint_to_be_made(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    model, _ = load_decoder(load_model_info(str(folder)), CPU, torch.float32, "dummy")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_without_a_checkpoint_the_configuration_tells_whether_a_head_is_the_embedding(
    tied: bool, tmp_path: Path
) -> None:
    folder = make_t5(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    model, _ = load_decoder(load_model_info(str(folder)), CPU, torch.float32, "dummy")
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied


def test_what_goes_through_the_layers_keeps_its_size(folder: Path) -> None:
    info = load_model_info(str(folder))
    encoder, _ = load_encoder(info, CPU, torch.float16, "dummy")
    features = torch.randn(1, info.config["num_mel_bins"], 3000, dtype=torch.float16)
    output = encoder.module(features).last_hidden_state
    assert 0.1 < output.std() < 10
    assert output.isfinite().all()


def test_a_model_without_a_checkpoint_answers_and_answers_alike(folder: Path) -> None:
    sound = (np.sin(np.arange(16000) / 20), 16000)
    prompt = {"prompt_token_ids": [257, 258], "multi_modal_data": {"audio": sound}}
    answers = []
    for _ in range(2):
        [output] = LLM(folder, load_format="dummy").generate([prompt], GREEDY)  # type: ignore[list-item]
        answers.append(output.outputs[0].token_ids)
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]
