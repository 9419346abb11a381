"""Which rows of the pictures a token reads: transformers' mask, on random prompts, and the drawing in the module."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from engine.state.cross_ranges import CrossInput, table_rows, write_ranges

MAX_TILES, ROWS_PER_TILE = 4, 3
IMAGE = 9
NUM_ROWS = MAX_TILES * ROWS_PER_TILE
prompts = st.lists(st.sampled_from([1, IMAGE]), min_size=1, max_size=24)


def inputs_of(prompt: list[int], tiles: list[int]) -> list[CrossInput]:
    places = [index for index, token in enumerate(prompt) if token == IMAGE]
    return [CrossInput(place, NUM_ROWS, count * ROWS_PER_TILE) for place, count in zip(places, tiles, strict=False)]


def tables_of(inputs: list[CrossInput]) -> npt.NDArray[np.int64]:
    """For each row of the table, which row of the outputs laid end to end it is."""
    outputs = [torch.arange(i * NUM_ROWS, (i + 1) * NUM_ROWS)[:, None] for i in range(len(inputs))]
    rows: npt.NDArray[np.int64] = table_rows(outputs, inputs)[:, 0].numpy()
    return rows


def ranges_of(inputs: list[CrossInput], positions: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Of tokens in a row; the memory has what others left there."""
    ranges, after = np.full((len(positions), 2), 77), np.ones(len(positions), np.bool_)
    write_ranges(inputs, positions[0], ranges, after)
    return ranges, after


@given(prompts, st.lists(st.integers(1, MAX_TILES), min_size=24, max_size=24), st.integers(0, 5))
def test_ranges_are_the_mask_of_transformers(prompt: list[int], tiles: list[int], generated: int) -> None:
    inputs = inputs_of(prompt, tiles)
    positions = np.arange(len(prompt) + generated)
    ranges, after = ranges_of(inputs, positions)
    if not inputs:
        assert (ranges[:, 0] == ranges[:, 1]).all()
        return
    sparse = get_cross_attention_token_mask(prompt, IMAGE)
    num_tiles = [tiles[: len(inputs)]]
    [tile_mask] = convert_sparse_cross_attention_mask_to_dense([sparse], num_tiles, MAX_TILES, len(prompt))
    mask = tile_mask.repeat(ROWS_PER_TILE, axis=-1).reshape(len(prompt), -1).astype(bool)
    sees_any = mask.any(axis=-1)
    assert np.array_equal(after[: len(prompt)], sees_any)
    assert after[len(prompt) :].all()
    mask[~sees_any] = True  # where nothing is to be seen transformers lifts the mask
    table = tables_of(inputs)
    for position, (start, end) in enumerate(ranges):
        expected = np.flatnonzero(mask[min(position, len(prompt) - 1)])  # what is generated is masked like the last
        assert sorted(table[start:end]) == expected.tolist()
    assert not ranges[len(prompt) :, 0].any(), "kernels over pages begin with the first row"


def test_the_drawing() -> None:
    inputs = [CrossInput(2, 10, 4), CrossInput(5, 10, 6), CrossInput(6, 10, 1)]
    expected = [(0, 30)] * 2 + [(7, 11)] * 3 + [(0, 6)] + [(0, 7)] * 3
    ranges, after = ranges_of(inputs, np.arange(9))
    assert ranges.tolist() == [list(pair) for pair in expected]
    assert after.tolist() == [False] * 2 + [True] * 7


def test_any_tokens_of_a_sequence_can_be_asked_for() -> None:
    inputs = [CrossInput(2, 10, 4), CrossInput(5, 10, 6)]
    every, behind = ranges_of(inputs, np.arange(40))
    for positions in (np.arange(1, 4), np.array([39]), np.arange(5, 6)):
        ranges, after = ranges_of(inputs, positions)
        assert np.array_equal(ranges, every[positions])
        assert np.array_equal(after, behind[positions])


def test_a_text_reads_nothing() -> None:
    ranges, after = ranges_of([], np.arange(3))
    assert ranges.tolist() == [[0, 0]] * 3
    assert not after.any()
