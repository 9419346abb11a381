"""The pictures: the same seed draws the same picture, and what is held out stays held out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tools.signpost import scenes
from tools.signpost.scenes import BUILT_IN, HELD_OUT_PAIRS, KINDS, SIZES, is_held_out, render


@pytest.mark.parametrize("size", SIZES)
def test_same_seed_draws_same_picture(size: tuple[int, int]) -> None:
    first, again, other = (render(random.Random(seed), size, "test") for seed in (3, 3, 4))
    assert first.answers == again.answers
    assert first.image.size == size
    assert np.array_equal(np.asarray(first.image), np.asarray(again.image))
    assert not np.array_equal(np.asarray(first.image), np.asarray(other.image))


def test_splits_share_no_text_and_training_shows_no_held_out_pair() -> None:
    rng = random.Random(0)
    train = [render(rng, SIZES[0], "train", (BUILT_IN,)) for _ in range(300)]
    test = [render(rng, SIZES[0], "test", (BUILT_IN,)) for _ in range(100)]
    assert not any(is_held_out(scene.answers["text"]) for scene in train)
    assert all(is_held_out(scene.answers["text"]) for scene in test)
    pairs = {(scene.answers["colour"], scene.answers["shape"]) for scene in train}
    assert not pairs & HELD_OUT_PAIRS
    assert any(scene.unseen_pair for scene in test)


def test_texts_and_answers_are_of_the_stated_form() -> None:
    rng = random.Random(1)
    for _ in range(200):
        scene = render(rng, rng.choice(SIZES))
        text = scene.answers["text"]
        assert tuple(scene.answers) == KINDS
        assert 2 <= len(text) <= 4
        assert set(text) <= set(scenes.CHARACTERS)
        assert scene.type_size >= scenes.MIN_TYPE
        assert int(scene.answers["circles"]) == len(scene.circles) <= scenes.MAX_CIRCLES
        # Letters and digits stand together only where they cannot be confused.
        assert text.isalpha() or text.isdigit() or not set(text) & set("IO01")


def test_built_in_face_is_always_found() -> None:
    assert BUILT_IN in scenes.find_faces()
