"""Input preparation gives the numbers of the document's two worked steps (block size 2, context 12, budget 10)."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.state.inputs import InputBuffers, StepInputs
from engine.state.request import Sequence

TOKENS = [[100, 101, 102], [200, 201], [300, 301, 302, 303, 304, 305, 306, 307]]


def acquire_slot(buffers: InputBuffers) -> int:
    sequence = cast(Sequence, SimpleNamespace(slot_index=-1))
    buffers.acquire_slots([sequence])
    return sequence.slot_index


@pytest.fixture
def buffers() -> InputBuffers:
    buffers = InputBuffers(max_num_seqs=4, max_model_len=12, block_size=2)
    for tokens, blocks in zip(TOKENS, [[1, 2], [3], [4, 5, 6]], strict=True):
        buffers.update(acquire_slot(buffers), tokens, blocks, 0)
    return buffers


def expect(inputs: StepInputs, **expected: list[int]) -> None:
    for name, values in expected.items():
        assert getattr(inputs, name).tolist() == values, name


def test_step_1_all_requests_in_prefill(buffers: InputBuffers) -> None:
    inputs = buffers.prepare([0, 1, 2], [3, 2, 5])
    expect(
        inputs,
        request_indices=[0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        positions=[0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        token_indices=[0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
        input_ids=[100, 101, 102, 200, 201, 300, 301, 302, 303, 304],
        block_table_indices=[0, 0, 1, 6, 6, 12, 12, 13, 13, 14],
        slot_mapping=[2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        query_start_loc=[0, 3, 5, 10],
        seq_lens=[3, 2, 5],
        num_computed_tokens=[0, 0, 0],
    )


def test_step_2_chunked_prefill_beside_decodes(buffers: InputBuffers) -> None:
    buffers.update(0, [*TOKENS[0], 103], [1, 2], 3)
    buffers.update(1, [*TOKENS[1], 202], [3, 7], 2)
    buffers.update(2, TOKENS[2], [4, 5, 6, 8], 5)
    inputs = buffers.prepare([0, 1, 2], [1, 1, 3])
    expect(
        inputs,
        request_indices=[0, 1, 2, 2, 2],
        positions=[3, 2, 5, 6, 7],
        token_indices=[3, 14, 29, 30, 31],
        input_ids=[103, 202, 305, 306, 307],
        block_table_indices=[1, 7, 14, 15, 15],
        slot_mapping=[5, 14, 13, 16, 17],
        query_start_loc=[0, 1, 2, 5],
        seq_lens=[4, 3, 8],
        num_computed_tokens=[3, 2, 5],
    )


def test_a_slot_that_is_used_again_remembers_nothing(buffers: InputBuffers) -> None:
    buffers.release_slots([cast(Sequence, SimpleNamespace(slot_index=2))])
    slot = acquire_slot(buffers)
    buffers.update(slot, [7], [9], 0)
    inputs = buffers.prepare([slot], [1])
    expect(inputs, input_ids=[7], slot_mapping=[18], positions=[0])
    assert buffers.block_table[slot].tolist() == [9, 0, 0, 0, 0, 0]


@given(st.data())
def test_a_whole_step_is_updated_as_its_rows_one_by_one(data: st.DataObject) -> None:
    """Rows that begin, grow by one, grow by several, wait, get blocks, or have one replaced, in any order."""
    together, alone = (InputBuffers(max_num_seqs=3, max_model_len=20, block_size=2) for _ in range(2))
    slots = [acquire_slot(together) for _ in range(3)]
    assert [acquire_slot(alone) for _ in range(3)] == slots
    tokens: list[list[int]] = [[1], [2], [3]]
    blocks: list[list[int]] = [[1], [2], [3]]
    for _ in range(data.draw(st.integers(1, 6))):
        for number in range(3):
            new = data.draw(st.lists(st.integers(0, 99), max_size=3))
            tokens[number] += new
            while 2 * len(blocks[number]) < len(tokens[number]):
                blocks[number].append(data.draw(st.integers(1, 99)))
        chosen = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        computed = [data.draw(st.integers(0, len(tokens[number]) - 1)) for number in chosen]
        for number, count in zip(chosen, computed, strict=True):
            if data.draw(st.booleans()):  # a shared block is copied before it is written
                blocks[number][count // 2] = data.draw(st.integers(1, 99))
        rows = [slots[number] for number in chosen]
        step = [tokens[number] for number in chosen], [blocks[number] for number in chosen]
        together.update_all(rows, *step, computed)
        for row, token_ids, table, count in zip(rows, *step, computed, strict=True):
            alone.update(row, token_ids, table, count)
        counts = [data.draw(st.integers(1, len(t) - c)) for t, c in zip(step[0], computed, strict=True)]
        got, expected = together.prepare(rows, counts), alone.prepare(rows, counts)
        for name in ("input_ids", "slot_mapping", "positions", "query_start_loc", "seq_lens", "block_table"):
            assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name


@given(st.data())
def test_vectorised_arithmetic_equals_a_loop_over_tokens(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    buffers = InputBuffers(max_num_seqs=4, max_model_len=20, block_size=block_size)
    rows, counts, expected = [], [], []
    for number in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 20))
        computed = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - computed))
        blocks = [1 + number * 20 + i for i in range(-(-length // block_size))]
        slot = acquire_slot(buffers)
        buffers.update(slot, [number * 100 + i for i in range(length)], blocks, computed)
        rows.append(slot)
        counts.append(count)
        for position in range(computed, computed + count):
            block = blocks[position // block_size]
            expected.append((position, number * 100 + position, block * block_size + position % block_size))
    inputs = buffers.prepare(rows, counts)
    got = np.stack([inputs.positions, inputs.input_ids, inputs.slot_mapping], axis=1)
    assert [tuple(row) for row in got.tolist()] == expected
