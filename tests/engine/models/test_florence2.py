"""Florence-2: prompts, pixels, encoder outputs and decoder are transformers'."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutput

from common.errors import TriptychError
from common.model_info import load_model_info
from common.text.processor import TextProcessor
from common.text.prompts import join_media, split_media
from common.text.tasks import TASKS
from engine import processors
from engine.processors import ProcessedInput
from tests.engine.models.dense import decoder_of, edit_json, logits_of
from tests.engine.models.encoders import assert_outputs_equal, encoder_of
from tests.engine.models.reads import reads_of_both
from tests.engine.models.test_decoders import assert_equal_logits
from tests.equality.processors import make_processor
from tests.media_files import encoded, noise
from tests.tiny.florence2 import NUM_ROWS, make_florence2

SIZES = ((64, 64), (140, 84), (30, 90), (200, 40))
TEXTS = ("<CAPTION>", "<OPEN_VOCABULARY_DETECTION> a house", "a much longer question about what is here", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_florence2(tmp_path_factory.mktemp("florence2") / "model")


@torch.inference_mode()
def theirs_of(folder: Path, dtype: torch.dtype, item: ProcessedInput) -> torch.Tensor:
    """The encoder's output as transformers computes it."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    ids, pixels = (torch.from_numpy(item.arrays[name])[None] for name in ("input_ids", "pixel_values"))
    output = model(input_ids=ids, pixel_values=pixels.to(dtype), decoder_input_ids=torch.tensor([[2]]))
    rows: torch.Tensor = output.encoder_last_hidden_state[0]
    return rows


def items(folder: Path, dtype: str = "float32") -> list[ProcessedInput]:
    processors.init_worker(str(folder), dtype)
    text = TextProcessor(load_model_info(str(folder)))
    return [
        processors.process("image", join_media(text.encode_beside(question, "prompt"), encoded(noise(*size))))
        for question, size in zip(TEXTS, SIZES, strict=True)
    ]


@pytest.mark.parametrize("text", [*TEXTS, *(task for task in TASKS), *(f"{task} <loc_1> x" for task in TASKS)])
def test_prompts_and_pixels_equal_transformers_which_refuses_the_same(folder: Path, text: str) -> None:
    info, image = load_model_info(str(folder)), noise(140, 84)
    own, theirs = TextProcessor(info), make_processor(info)
    try:
        expected: Any = theirs(images=image, text=text, return_tensors="np")
    except ValueError:
        with pytest.raises(TriptychError, match="takes no other text"):
            own.encode_beside(text, "prompt")
        return
    processors.init_worker(str(folder), "float32")
    item = processors.process("image", join_media(own.encode_beside(text, "prompt"), encoded(image)))
    assert np.array_equal(item.arrays["input_ids"], expected["input_ids"][0])
    assert np.array_equal(item.arrays["pixel_values"], expected["pixel_values"][0])


def test_encoder_outputs_equal_transformers_alone_and_together(folder: Path) -> None:
    assert_outputs_equal(folder, items(folder), partial(theirs_of, folder, torch.float32), atol=2e-4)


def test_in_bfloat16_they_are_as_far_off_as_those_of_transformers(folder: Path) -> None:
    encoder = encoder_of(folder, torch.bfloat16)
    for item in items(folder, "bfloat16"):
        [output] = encoder.encode([item])
        assert output.nbytes == item.size_bytes
        full, half = (theirs_of(folder, dtype, item).float() for dtype in (torch.float32, torch.bfloat16))
        assert (output.float() - full).norm() < 1.2 * (half - full).norm()


@pytest.mark.parametrize("overrides", [{}, {"scale_embedding": True, "activation_function": "relu"}], ids=str)
@torch.inference_mode()
def test_decoders_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_florence2(tmp_path / "model", **overrides)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    ids = torch.randint(3, 200, (60,), generator=torch.Generator().manual_seed(1))
    theirs = model(encoder_outputs=BaseModelOutput(rows[None]), decoder_input_ids=ids[None]).logits[0]
    assert_equal_logits(logits_of(decoder_of(folder), ids, encoder_output=rows), theirs)


def test_encoder_and_decoder_read_the_whole_checkpoint(folder: Path) -> None:
    encoder, decoder = reads_of_both(folder)
    [shared] = encoder.keys() & decoder.keys()
    assert shared == "model.language_model.shared.weight"


def test_the_number_of_rows_follows_the_convolutions(folder: Path, tmp_path: Path) -> None:
    assert items(folder)[0].shape == (NUM_ROWS + 3 + len("What does the image describe?") - 1, 64)
    large = make_florence2(tmp_path / "model", max_position_embeddings=1024)
    sizes = {"size": {"height": 768, "width": 768}, "crop_size": {"height": 768, "width": 768}}
    edit_json(large / "preprocessor_config.json", lambda json: {**json, **sizes})
    processors.init_worker(str(large), "float32")
    placeholder = load_model_info(str(large)).placeholder_token_id or 0
    item = processors.process("image", join_media([placeholder], encoded(noise(20, 20))))
    assert item.shape == (577, 64)


@pytest.mark.parametrize("joined", [b"", b"\1", b"\5\0\0\0\0\0"])
def test_a_joined_item_that_is_cut_off_is_refused(joined: bytes) -> None:
    with pytest.raises(TriptychError, match="the text would end at"):
        split_media(joined)


def test_what_is_joined_comes_apart_again() -> None:
    assert split_media(join_media([5, 70_000], b"picture")) == ([5, 70_000], b"picture")
