"""The bundled model on a small sample; `tools/signpost/evaluate.py` is the full evaluation.

The sample uses Pillow's built-in face alone, so that it is the same on every machine, and sixty pictures: an exact
share of 0.95 may come out some percent lower, so 0.9 is asked here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tools.signpost.evaluate import (
    Hits,
    Signpost,
    ask_about,
    draw,
    evaluate_follow_ups,
    evaluate_pairs,
    evaluate_single,
)
from tools.signpost.scenes import BUILT_IN, KINDS, QUESTIONS

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "common" / "bundled" / "signpost"
PICTURES = 60


@pytest.fixture(scope="module")
def model() -> Signpost:
    return Signpost(FOLDER, torch.float32)


@pytest.fixture(scope="module")
def single(model: Signpost) -> tuple[Hits, Hits, Hits]:
    rng = random.Random("sample")
    return evaluate_single(model, draw(rng, PICTURES, (BUILT_IN,)), rng)


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def test_folder_is_small_and_ordinary() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16_000_000
    assert AutoConfig.from_pretrained(FOLDER).model_type == "qwen2_5_vl"
    model = AutoModelForImageTextToText.from_pretrained(FOLDER)
    assert model.dtype == torch.bfloat16
    assert 3_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 8_000_000
    assert AutoImageProcessor.from_pretrained(FOLDER, backend="pil").merge_size == 2
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.decode(tokenizer("Crème brûlée? 12").input_ids) == "Crème brûlée? 12"


@pytest.mark.parametrize("kind", KINDS)
def test_card_states_the_evaluation_and_it_reached_the_goal(kind: str) -> None:
    figures = json.loads((FOLDER / "evaluation.json").read_text())
    names = ("one picture", "one picture, built-in face alone", "follow-up questions", "one of two pictures")
    card = next(line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| {kind} |"))
    for name in names:
        assert figures[name][kind]["exact"] >= 0.95
        assert f"{figures[name][kind]['exact'] * 100:.1f} % (n={figures[name][kind]['n']})" in card


@pytest.mark.parametrize("kind", KINDS)
def test_answers_held_out_pictures(single: tuple[Hits, Hits, Hits], kind: str) -> None:
    assert share(single[0][kind]) >= 0.9


@pytest.mark.parametrize(("kind", "limit"), [("text", 0.1), ("colour", 0.35), ("shape", 0.45), ("circles", 0.4)])
def test_swapped_pictures_bring_answers_to_chance(single: tuple[Hits, Hits, Hits], kind: str, limit: float) -> None:
    """With another prompt's picture, an answer is right only where the two pictures happen to agree."""
    _, swapped, chance = single
    assert share(swapped[kind]) <= limit
    assert abs(share(swapped[kind]) - share(chance[kind])) <= 0.1


def test_answers_follow_up_questions(model: Signpost) -> None:
    rng = random.Random("follow-ups")
    hits = evaluate_follow_ups(model, draw(rng, 30, (BUILT_IN,)), rng)
    assert share([hit for kind in KINDS for hit in hits[kind]]) >= 0.9


def test_answers_about_one_of_two_pictures(model: Signpost) -> None:
    rng = random.Random("pairs")
    first, second = draw(rng, 27, (BUILT_IN,)), draw(rng, 27, (BUILT_IN,))
    hits = evaluate_pairs(model, list(zip(first, reversed(second), strict=True)), rng)
    assert share([hit for kind in KINDS for hit in hits[kind]]) >= 0.9


def test_picture_sizes_vary_the_token_count(model: Signpost) -> None:
    scenes = draw(random.Random("sizes"), 9, (BUILT_IN,))
    processor = AutoImageProcessor.from_pretrained(FOLDER, backend="pil")
    grids = processor(images=[scene.image for scene in scenes], return_tensors="pt")["image_grid_thw"]
    counts = [scene.image.width * scene.image.height // 784 for scene in scenes]
    assert (grids.prod(-1) // 4).tolist() == counts
    assert len(set(counts)) >= 6
    assert len(model.answer([ask_about([scene.image], QUESTIONS["text"][0]) for scene in scenes])) == 9
