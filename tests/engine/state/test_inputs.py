"""Input preparation gives the numbers of the document's two worked steps (block size 2, context 12, budget 10)."""

import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.model_info import ModelInfo
from engine.attention.metadata import AttentionMetadata
from engine.attention.visible import causal_keys
from engine.cache.block_manager import BlockManager
from engine.runner.cross import CrossBatch
from engine.runner.step import positions_of
from engine.state.inputs import InputBuffers, ScheduledStep, StepInputs
from engine.state.request import Sequence
from tests.engine.driving import Driver, Job, greedy, make_engine, text_tokens

TOKENS = [[100, 101, 102], [200, 201], [300, 301, 302, 303, 304, 305, 306, 307]]


CPU = torch.device("cpu")


def make_buffers(max_num_seqs: int, max_model_len: int, block_size: int, max_tokens: int) -> InputBuffers:
    return InputBuffers(max_num_seqs, max_model_len, block_size, max_tokens)


def acquire_slot(buffers: InputBuffers) -> int:
    sequence = cast(Sequence, SimpleNamespace(slot_index=-1))
    buffers.acquire_slots([sequence])
    return sequence.slot_index


@pytest.fixture
def buffers() -> InputBuffers:
    buffers = make_buffers(max_num_seqs=4, max_model_len=12, block_size=2, max_tokens=10)
    for tokens, blocks in zip(TOKENS, [[1, 2], [3], [4, 5, 6]], strict=True):
        buffers.update(acquire_slot(buffers), tokens, blocks, 0)
    return buffers


def expect(inputs: StepInputs, **expected: list[int]) -> None:
    for name, values in expected.items():
        assert getattr(inputs, name).tolist() == values, name


def assert_hides(inputs: StepInputs, rows: list[list[bool]]) -> None:
    mask = inputs.attention_mask
    assert mask is not None
    assert mask.tolist() == rows


def test_step_1_all_requests_in_prefill(buffers: InputBuffers) -> None:
    inputs = buffers.prepare([0, 1, 2], [3, 2, 5])
    expect(
        inputs,
        request_indices=[0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        positions=[0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        token_indices=[0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
        input_ids=[100, 101, 102, 200, 201, 300, 301, 302, 303, 304],
        block_table_indices=[0, 0, 1, 6, 6, 12, 12, 13, 13, 14],
        block_numbers=[1, 1, 2, 3, 3, 4, 4, 5, 5, 6],
        block_offsets=[0, 1, 0, 0, 1, 0, 1, 0, 1, 0],
        slot_mapping=[2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        query_start_loc=[0, 3, 5, 10],
        seq_lens=[3, 2, 5],
        num_computed_tokens=[0, 0, 0],
        num_tokens=[3, 2, 5],
        block_table=[[1, 2, 0], [3, 0, 0], [4, 5, 6]],
    )
    assert (inputs.num_requests, inputs.max_query_len) == (3, 5)
    assert buffers.token_ids.shape == (4, 12)
    assert buffers.token_ids[:3].tolist() == [row + [0] * (12 - len(row)) for row in TOKENS]
    assert buffers.block_table.tolist() == [[1, 2, *[0] * 4], [3, *[0] * 5], [4, 5, 6, *[0] * 3], [0] * 6]
    assert_hides(inputs, [[False] * seen + [True] * (5 - seen) for seen in (1, 2, 3, 4, 5)])


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
        block_numbers=[2, 7, 6, 8, 8],
        block_offsets=[1, 0, 1, 0, 1],
        slot_mapping=[5, 14, 13, 16, 17],
        query_start_loc=[0, 1, 2, 5],
        seq_lens=[4, 3, 8],
        num_computed_tokens=[3, 2, 5],
        num_tokens=[1, 1, 3],
        block_table=[[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]],
    )
    assert (inputs.num_requests, inputs.max_query_len) == (3, 3)
    assert_hides(inputs, [[False] * seen + [True] * (8 - seen) for seen in (4, 3, 6, 7, 8)])
    assert buffers.block_table.tolist() == [[1, 2, *[0] * 4], [3, 7, *[0] * 4], [4, 5, 6, 8, 0, 0], [0] * 6]


def test_an_engine_schedules_the_two_steps_as_the_document_does(tiny_llama: ModelInfo) -> None:
    """Counts and blocks are the scheduler's own: a budget of ten tokens, and blocks 7 and 8 for whoever grows first."""
    sizes: dict[str, Any] = {"max_model_len": 12, "max_num_batched_tokens": 10, "max_num_seqs": 4}
    engine = make_engine(tiny_llama, 20, block_size=2, **sizes)
    driver, seen, buffers = Driver(engine), list[StepInputs](), engine.runner.buffers
    prepare = buffers.prepare

    def watched(slots: Any, counts: Any) -> StepInputs:
        inputs = prepare(slots, counts)
        copied = {member.name: getattr(inputs, member.name).copy() for member in fields(inputs)}
        seen.append(StepInputs(**copied))
        return inputs

    buffers.prepare = watched  # type: ignore[method-assign]
    for name, length in zip("012", (3, 2, 8), strict=True):
        driver.add(Job(name, text_tokens(0, length), greedy(4)))
    driver.step()
    driver.step()
    expect(
        seen[0],
        num_tokens=[3, 2, 5],
        positions=[0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        token_indices=[0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
        slot_mapping=[2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        block_table=[[1, 2, 0], [3, 0, 0], [4, 5, 6]],
    )
    expect(
        seen[1],
        num_tokens=[1, 1, 3],
        num_computed_tokens=[3, 2, 5],
        positions=[3, 2, 5, 6, 7],
        token_indices=[3, 14, 29, 30, 31],
        slot_mapping=[5, 14, 13, 16, 17],
        block_table=[[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]],
    )


def test_slot_of_a_token_is_block_number_times_block_size_plus_offset() -> None:
    """The document on attention: blocks of 4, and position 6 in the second block of a request, which is block 7."""
    buffers = make_buffers(max_num_seqs=1, max_model_len=8, block_size=4, max_tokens=1)
    buffers.update(acquire_slot(buffers), [10, 11, 12, 13, 14, 15, 16], [3, 7], 6)
    inputs = buffers.prepare([0], [1])
    expect(inputs, positions=[6], block_numbers=[7], block_offsets=[2], slot_mapping=[30])


def test_decodes_have_no_mask_for_they_see_all_their_keys(buffers: InputBuffers) -> None:
    inputs = buffers.prepare([0, 1, 2], [1, 1, 1])
    assert inputs.attention_mask is None
    assert causal_keys(1, 9, None, CPU).hidden is None


def places(arrays: list[Any]) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]


def most_bytes(work: Callable[[], Any]) -> int:
    """Return the memory that `work` takes at most; 0 where nothing is traced."""
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    work()
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.parametrize(("count", "length"), [(32, 256), (1024, 8)], ids=["tokens", "requests"])
def test_a_step_allocates_no_array(count: int, length: int) -> None:
    """Neither what it returns nor what it computes with: of 8,192 tokens no array is made, nor of 1,024 requests."""
    buffers = make_buffers(count, length, 2, max_tokens=count * length)
    slots = [acquire_slot(buffers) for _ in range(count)]
    memory = buffers.staging
    started = [array for array in vars(buffers).values() if isinstance(array, np.ndarray)]
    start = places([*started, *(flat for _, flat in memory._hosts)])
    tokens, blocks = [[7] * length] * count, [list(range(length // 2))] * count

    def step(computed: int, num_tokens: int) -> None:
        scheduled, before = [num_tokens] * count, [computed] * count
        taken = most_bytes(lambda: buffers.update_all(slots, tokens, blocks, before))
        assert taken < 3 * 9 * count + 4096, "three lists of requests, and half of an array of 1,024"
        taken = min(most_bytes(lambda: buffers.prepare(slots, scheduled)) for _ in range(3))
        assert taken < 4096, "half of an array of 1,024 requests"
        inputs = buffers.prepare(slots, scheduled)
        members = [getattr(inputs, member.name) for member in fields(inputs)]
        outside = [one for one in places(members) if not any(a <= one[0] and one[1] <= b for a, b in start)]
        assert not outside
        told = [inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.block_table, inputs.request_indices]
        assert [tensor.data_ptr() for tensor in memory.send(*told)] == [first for first, _ in places(told)]

    step(0, length)
    tracemalloc.start()
    try:
        for computed, num_tokens in ((0, length), (length // 3, length // 2), (length - 1, 1)):
            step(computed, num_tokens)
    finally:
        tracemalloc.stop()


def test_positions_with_three_axes_allocate_no_array() -> None:
    """A prompt of an image of 32 x 32 with its text behind it, beside one without images that decodes."""
    grid = np.stack((np.zeros(1024, np.int64), *np.divmod(np.arange(1024), 32)))
    image = SimpleNamespace(mrope_positions=grid, mrope_end=32 + 1024, prompt=[7] * 2048)
    text = SimpleNamespace(mrope_positions=np.zeros((3, 0), np.int64), mrope_end=5, prompt=[7] * 5)
    requests = [
        SimpleNamespace(request=text, num_computed_tokens=9),
        SimpleNamespace(request=image, num_computed_tokens=0),
    ]
    step = ScheduledStep(cast(list[Sequence], requests), [1, 2048], [])
    buffers = make_buffers(2, 2048, 16, max_tokens=2049)
    slots = [acquire_slot(buffers) for _ in requests]
    buffers.update_all(slots, [[7] * 10, [7] * 2048], [[1], list(range(2, 130))], [9, 0])
    inputs = buffers.prepare(slots, step.num_tokens)
    expected = np.concatenate(([[9]] * 3, grid, [range(32, 32 + 1024)] * 3), axis=1)
    tracemalloc.start()
    try:
        taken = min(most_bytes(lambda: positions_of(step, inputs, uses_mrope=True)) for _ in range(3))
    finally:
        tracemalloc.stop()
    assert taken < 4096, "a quarter of an array of 2,049 tokens"
    assert (positions_of(step, inputs, uses_mrope=True) == expected).all()


def test_blocks_of_encoder_inputs_are_put_into_memory_made_at_start() -> None:
    """Of 64 requests with 512 blocks each, then of half of them, and of more blocks than one input has."""
    tables = {str(number): [7 + number] * (512 - number) for number in range(64)}
    blocks = cast(BlockManager, SimpleNamespace(get_cross_block_table=tables.get))
    batch, buffers = (
        CrossBatch(CPU, 64, 512, inputs_in_prompt=False, biased=False),
        make_buffers(64, 8, 2, max_tokens=64),
    )
    slots = [acquire_slot(buffers) for _ in tables]
    buffers.update_all(slots, [[7]] * 64, [[1]] * 64, [0] * 64)

    def table_of(names: list[str]) -> Any:
        requests = [SimpleNamespace(request_id=name, num_encoder_tokens=2 * len(tables[name])) for name in names]
        sequences = [SimpleNamespace(request=request) for request in requests]
        step = ScheduledStep(cast(list[Sequence], sequences), [1] * len(names), [])
        inputs = buffers.prepare(slots[: len(names)], step.num_tokens)
        metadata = batch.metadata(step, inputs, blocks, on_device=True)
        assert metadata is not None
        return metadata.block_table

    room = places([batch.memory.send(batch.memory.take(64, 512))[0].numpy()])[0]
    tracemalloc.start()
    try:
        for names in ([*tables], [*tables][::-2]):
            assert most_bytes(lambda names=names: table_of(names)) < 2**16, "a quarter of the table"
            table = table_of(names)
            assert table.tolist() == [tables[name] + [0] * (table.shape[1] - len(tables[name])) for name in names]
            first, last = places([table.numpy()])[0]
            assert room[0] <= first <= last <= room[1]
    finally:
        tracemalloc.stop()
    tables["long"] = [9] * 512 * 65
    assert table_of(["long"]).tolist() == [tables["long"]]
    grown = batch.memory
    assert table_of(["0"]).tolist() == [tables["0"]]
    assert table_of(["long"]).tolist() == [tables["long"]]
    assert batch.memory is grown, "once"


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_vision", "tiny_bart", "tiny_mllama"])
def test_tensors_of_every_step_lie_in_the_buffers_made_at_start(request: pytest.FixtureRequest, family: str) -> None:
    info: ModelInfo = request.getfixturevalue(family)
    engine = make_engine(info, max_num_batched_tokens=16)
    runner, seen = engine.runner, set[int]()
    media = [[(name, 6)] if info.has_cross_attention else [] for name in ("one", "other", "one")]
    shown = [] if info.is_encoder_decoder or not info.has_cross_attention else [info.placeholder_token_id or 0]
    cross, reads = runner._cross, set[int]()
    if cross is not None:
        room, read = places([cross.memory._target.numpy()])[0], cross.metadata
        made = places([runner.buffers._key_ranges, runner.buffers._after_input])

        def watched_cross(*args: Any, **options: Any) -> Any:
            metadata = read(*args, **options)
            if metadata is not None:
                arrays = metadata.key_ranges, metadata.after_input
                inside = [(metadata.table, room), (metadata.block_table.numpy(), room), *zip(arrays, made, strict=True)]
                for array, (first, last) in inside if shown else inside[:2]:
                    assert first <= array.ctypes.data <= array.ctypes.data + array.nbytes <= last
                reads.add(metadata.num_requests)
            return metadata

        cross.metadata = watched_cross  # type: ignore[method-assign]
    embed, forward, start = runner.model.embed, runner.model.forward, runner.buffers.staging._target

    def watched(embeddings: Any, positions: Any, attention: Any) -> Any:
        for tensor in (positions, attention.slot_mapping):
            assert 0 <= tensor.data_ptr() - start.data_ptr() < start.nbytes
        seen.add(len(embeddings))
        return forward(embeddings, positions, attention)

    def watched_embed(input_ids: torch.Tensor) -> torch.Tensor:
        assert 0 <= input_ids.data_ptr() - start.data_ptr() < start.nbytes
        return embed(input_ids)

    def watched_plan(metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> Any:
        if metadata.causal:
            planned.add(len(metadata.seq_lens))
            assert 0 <= metadata.block_table.data_ptr() - start.data_ptr() < start.nbytes
            assert metadata.host_table is not None
            assert metadata.host_table.ctypes.data == metadata.block_table.data_ptr(), "on a CPU"
        return plan(metadata, block_size, dtype)

    planned = set[int]()
    plan, runner.backend.plan = runner.backend.plan, watched_plan  # type: ignore[method-assign]
    runner.model.forward, runner.model.embed = watched, watched_embed  # type: ignore[method-assign]
    driver = Driver(engine)
    for number in range(3):
        driver.add(Job(str(number), [*shown, *text_tokens(number, 9 + 5 * number)], greedy(4), media[number]))
    driver.finish()
    assert {16, 3} <= seen, "prompts in parts, and decodes"
    assert 3 in planned
    assert cross is None or 3 in reads


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
    together, alone = (make_buffers(3, 20, 2, max_tokens=60) for _ in range(2))
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
    buffers = make_buffers(4, 20, block_size, max_tokens=80)
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
