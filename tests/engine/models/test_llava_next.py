"""LLaVA-NeXT: prompts, pixels and encoder outputs are transformers', whose image processor is used as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForImageTextToText

from common.errors import TriptychError
from common.model_info import ModelInfo, load_model_info
from common.text.processor import TextProcessor
from engine import processors
from engine.models.base import EncoderModel
from engine.models.registry import make_encoder
from engine.processors import ProcessedInput
from engine.processors.llava_next import LlavaNextProcessor
from tests.engine.models.dense import decoder_of, edit_json
from tests.engine.models.encoders import assert_bfloat16_close, assert_outputs_equal, encoder_of, pictures
from tests.engine.models.reads import reads_of_both
from tests.engine.models.test_loader import rewritten
from tests.equality.processors import expand, make_processor
from tests.media_files import encoded, noise
from tests.tiny.llava import make_llava_next

SIZES = ((28, 28), (84, 140), (30, 29), (28, 196), (150, 75), (3, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava_next(tmp_path_factory.mktemp("next") / "model")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> EncoderModel:
    return encoder_of(folder)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_prompts_and_pixels_equal_transformers(folder: Path, size: tuple[int, int]) -> None:
    info = load_model_info(str(folder))
    prompt = TextProcessor(info).render_chat([{"role": "user", "content": [{"type": "image"}]}])
    theirs = expand(make_processor(info), info, prompt, [noise(*size)])
    arrays, layout, shape = LlavaNextProcessor(info)(encoded(noise(*size)))
    [(placeholder, count)] = layout.expansion
    ours = [token for one in prompt for token in [one] * (count if one == placeholder else 1)]
    assert ours == theirs["input_ids"][0].tolist()
    assert np.array_equal(arrays["pixel_values"], theirs["pixel_values"][0].numpy())
    assert shape == (layout.num_encoder_tokens, 64)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300))
def test_any_size_has_as_many_tokens_as_rows(folder: Path, encoder: EncoderModel, width: int, height: int) -> None:
    processors.init_worker(str(folder), "float32")
    item = processors.process("image", encoded(noise(width, height)))
    assert item.shape[0] == encoder.encode([item])[0].shape[0]


def test_encoder_outputs_equal_transformers(folder: Path) -> None:
    reference: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def expected(item: ProcessedInput) -> Tensor:
        pixels, size = (torch.from_numpy(item.arrays[name])[None] for name in ("pixel_values", "image_sizes"))
        features: Tensor = reference.model.get_image_features(pixels, size).pooler_output[0]
        return features

    assert_outputs_equal(folder, pictures(folder, sizes=SIZES), expected)
    assert_bfloat16_close(folder, pictures(folder, "bfloat16", SIZES))


def test_a_preprocessor_unknown_to_transformers_is_refused(tmp_path: Path) -> None:
    folder = make_llava_next(tmp_path / "model")
    edit_json(folder / "preprocessor_config.json", lambda json: {**json, "image_processor_type": "NoImageProcessor"})
    with pytest.raises(TriptychError, match=r"preprocessor .* cannot be used"):
        processors.init_worker(str(folder), "float32")


@pytest.mark.parametrize(
    ("file", "kind", "auto", "make"),
    [
        ("config.json", "model_type", "AutoConfig", make_encoder),
        ("preprocessor_config.json", "image_processor_type", "AutoImageProcessor", processors.make_processor),
    ],
)
def test_code_in_a_folder_is_not_run_and_nobody_is_asked(
    file: str,
    kind: str,
    auto: str,
    make: Callable[[ModelInfo], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_llava_next(tmp_path / "model")
    edit_json(folder / file, lambda config: {**config, kind: "own", "auto_map": {auto: "code.Own"}})
    (folder / "code.py").write_text("raise SystemExit('it runs')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked to run it"))
    with pytest.raises(TriptychError, match="execute"):
        make(load_model_info(str(folder)))


def test_a_checkpoint_under_the_names_of_todays_modules_is_shared_out(folder: Path, tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        if name.startswith("language_model."):
            return name.replace("language_model.lm_head", "lm_head").replace(
                "language_model.model", "model.language_model"
            )
        return f"model.{name}"

    other = rewritten(folder, tmp_path / "model", lambda tensors: {renamed(name): t for name, t in tensors.items()})
    assert [sum(one.values()) for one in reads_of_both(other)] == [sum(one.values()) for one in reads_of_both(folder)]


def test_a_text_model_that_only_shares_the_names_of_llama_is_refused(tmp_path: Path) -> None:
    folder = make_llava_next(tmp_path / "model")
    granite = {"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0}
    edit_json(folder / "config.json", lambda json: {**json, "text_config": {**json["text_config"], **granite}})
    with pytest.raises(TriptychError, match=r"text_config\.model_type 'granite' is not supported; supported: llama"):
        decoder_of(folder)
