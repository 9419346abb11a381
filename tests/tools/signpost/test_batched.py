"""The training forward and the training sequences against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tools.signpost import data, scenes
from tools.signpost.data import Conversations, Encoder
from tools.signpost.scenes import Scene
from tools.signpost.train import STAGES, Trainer

FOLDER = Path(__file__).parents[3] / "common" / "bundled" / "signpost"


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)
    made = Trainer(model, torch.nn.ModuleDict(), STAGES["answers"])
    made.forward.dtype = torch.float32
    return made


@pytest.mark.parametrize("sizes", [((84, 56),), ((168, 140),), ((84, 84), (140, 112))])
@pytest.mark.parametrize("follow_ups", [False, True])
def test_training_forward_equals_reference(
    trainer: Trainer, sizes: tuple[tuple[int, int], ...], follow_ups: bool
) -> None:
    """One picture, two pictures and several turns: patches, positions and scores are the reference's."""
    encoder, rng = Encoder(AutoTokenizer.from_pretrained(FOLDER)), random.Random(1)
    drawn = [[scenes.render(rng, size, faces=(scenes.BUILT_IN,))] for size in sizes]
    batch = encoder.conversations(rng, drawn, "test", follow_ups, turns=4 if follow_ups else 1)
    with torch.no_grad():
        scores, _ = trainer.logits(batch)
        expected = reference_scores(trainer, batch, [group[0] for group in drawn], encoder.pad)
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


def reference_scores(trainer: Trainer, batch: Conversations, drawn: list[Scene], pad: int) -> torch.Tensor:
    processor = AutoImageProcessor.from_pretrained(FOLDER, backend="pil")
    pixels = processor(images=[scene.image for scene in drawn], return_tensors="pt")
    end = int((batch.segments[0] != data.PADDING).sum())
    ids = torch.from_numpy(batch.ids[:, :end])
    logits: torch.Tensor = trainer.model(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == pad).long(), **pixels
    ).logits
    return logits[torch.from_numpy(batch.targets[:, :end]) >= 0]


def test_separate_questions_see_the_pictures_and_nothing_of_one_another() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 2]])
    seen = data.attention_mask(segments, torch.float32)[0, 0] == 0
    assert seen[4].tolist() == [True, True, False, False, True]
    assert seen[3].tolist() == [True, True, True, True, False]


def test_follow_ups_are_what_the_chat_template_renders() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    encoder, rng = Encoder(tokenizer), random.Random(2)
    drawn = [[scenes.render(rng, (84, 56), faces=(scenes.BUILT_IN,))]]
    batch = encoder.conversations(rng, drawn, "train", follow_ups=True)
    text = tokenizer.decode(batch.ids[0][batch.segments[0] == 0].tolist())
    turns = [part.split("\n", 1) for part in text.replace("<|im_end|>", "").split("<|im_start|>")[1:]]
    messages = [{"role": role, "content": content.removesuffix("\n")} for role, content in turns]
    assert len(messages) == 8
    assert tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n") == text
