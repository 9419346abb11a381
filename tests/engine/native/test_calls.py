"""A step kept as calls computes on new inputs what it computed when it was kept; engines replay decode steps so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.model_info import ModelInfo, load_model_info
from engine.core.decoder_engine import DecoderEngine
from engine.native import build, ops
from engine.native.calls import CallRecorder
from tests.engine.driving import Job, greedy, make_engine, text, text_tokens
from tests.engine.runner.test_graphs import FAMILIES, graphs_of, mixed_jobs, run_staggered
from tests.tiny.gemma3 import make_gemma3
from tests.tiny.text import make_mistral


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    try:
        build.load_kernels()
    except build.KernelsUnavailableError as error:
        pytest.skip(str(error))


def engine_of(info: ModelInfo, **options: Any) -> DecoderEngine:
    return make_engine(info, num_blocks=60, dtype="bfloat16", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_say_what_eager_ones_say(family: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(family)
    jobs = mixed_jobs(info)
    expected = run_staggered(engine_of(info, enforce_eager=True), jobs)
    engine = engine_of(info)
    got = run_staggered(engine, jobs)
    assert not got.failures
    assert got.tokens == expected.tokens
    if family == "tiny_t5":  # whose bias is computed anew in every step
        assert engine.runner.graphs is None
    else:
        assert graphs_of(engine).num_replays > 10


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_vision", "tiny_mllama"])
def test_parts_of_prompts_are_replayed_beside_decodes(family: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(family)
    rows = {"tiny_vision": 30, "tiny_mllama": 4}.get(family, 0)
    tokens = [*text_tokens(20, 1), *([info.placeholder_token_id or 0] if rows else []), *text_tokens(25, 3)]
    jobs = [
        Job(f"prompt {number}", tokens[number:], greedy(12), [(f"content {number}", rows)] if rows else [])
        for number in range(4)
    ]
    options = {"max_num_batched_tokens": 24, "prefix_caching": False}
    expected = run_staggered(engine_of(info, enforce_eager=True, **options), jobs).tokens
    engine = engine_of(info, **options)
    assert run_staggered(engine, jobs).tokens == expected
    stats = engine.stats()
    assert stats["steps_replayed_total"] == stats["steps_total"]


def test_inputs_that_see_themselves_in_both_directions_are_replayed(tmp_path: Path) -> None:
    """And beside them windows, which begin behind the first key: Gemma 3 has both."""
    info = load_model_info(str(make_gemma3(tmp_path)))
    rows, placeholder = int(info.config["mm_tokens_per_image"]), info.placeholder_token_id
    assert placeholder is not None
    jobs = [
        Job(f"prompt {n}", [*text_tokens(9 + n, n), placeholder, *text_tokens(14, 5)], greedy(9), [(f"one {n}", rows)])
        for n in range(3)
    ]
    expected = run_staggered(engine_of(info, enforce_eager=True), jobs).tokens
    engine = engine_of(info)
    assert run_staggered(engine, jobs).tokens == expected
    stats = engine.stats()
    assert stats["steps_replayed_total"] == stats["steps_total"]


@pytest.mark.parametrize("sliding_window", [1, 6])
def test_windows_are_those_of_the_step(sliding_window: int, tmp_path: Path) -> None:
    info = load_model_info(str(make_mistral(tmp_path, sliding_window=sliding_window, head_dim=32)))
    jobs = [text(f"prompt {length}", length, greedy(20)) for length in (3, 9, 17)]
    expected = run_staggered(engine_of(info, enforce_eager=True), jobs).tokens
    engine = engine_of(info)
    assert run_staggered(engine, jobs).tokens == expected
    assert graphs_of(engine).num_replays > 10


def test_small_weights_are_multiplied_in_replayed_steps(tiny_llama: ModelInfo) -> None:
    jobs = mixed_jobs(tiny_llama)
    expected = run_staggered(engine_of(tiny_llama, quantization="int8", enforce_eager=True), jobs).tokens
    engine = engine_of(tiny_llama, quantization="int8")
    assert run_staggered(engine, jobs).tokens == expected
    assert graphs_of(engine).num_replays > 10


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"dtype": "float32"}, {"attention_backend": "torch"}])
def test_other_engines_record_nothing(options: dict[str, Any], tiny_llama: ModelInfo) -> None:
    assert make_engine(tiny_llama, **{"dtype": "bfloat16", **options}).runner.graphs is None


# --- the recorder


@torch.inference_mode()
def test_new_inputs_in_the_same_place_give_new_outputs() -> None:
    ops.enable()
    weight, x = torch.randn(16, 32).bfloat16(), torch.randn(3, 32).bfloat16()

    def work() -> Tensor:
        whole = ops.linear(x, weight)
        whole[:, :8].mul_(2)  # a view, and a change in place
        left, right = whole.chunk(2, dim=1)
        return torch.cat((left.float().exp(), right.float()), dim=1)

    replay = CallRecorder().record(work)
    for _ in range(3):
        x.copy_(torch.randn(3, 32))
        expected = work().clone()
        assert torch.equal(replay(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_behind_a_selection_rows_that_are_not_read_are_left_as_they_are(dtype: torch.dtype) -> None:
    ops.enable()
    weight, scale, x = torch.randn(18, 32).to(dtype), torch.randn(6).to(dtype), torch.randn(6, 4, 8).to(dtype)
    rows, num_rows = torch.arange(6), torch.tensor([6])
    outputs: list[Tensor] = []

    def work() -> Tensor:
        taken = ops.take_rows(x, rows, num_rows)
        outputs[:] = [taken, ops.linear(taken.view(6, 32), weight)]
        if dtype == torch.bfloat16:
            heads = outputs[-1].view(6, 3, 6)
            outputs.append(ops.add_rms_norm(heads, heads.clone(), scale, 1e-5))
            outputs.append(ops.silu_mul(outputs[-1].view(6, 18)))
        return outputs[-1]

    replay = CallRecorder().record(work)
    recorded = [*outputs]
    for chosen in ([4], [1, 2, 5], [0, 1, 2, 3, 4, 5], [3, 5]):
        x.copy_(torch.randn(6, 4, 8))
        rows[: len(chosen)], num_rows[0] = torch.tensor(chosen), len(chosen)
        for one in recorded:
            one.fill_(7)
        replay()
        work()
        for got, expected in zip(recorded, outputs, strict=True):
            assert torch.equal(got[: len(chosen)], expected[: len(chosen)])
            assert (got[len(chosen) :] == 7).all()
        assert torch.equal(recorded[0][: len(chosen)], x[chosen])


@torch.inference_mode()
def test_smaller_recordings_use_the_memory_of_the_first() -> None:
    recorder, sizes = CallRecorder(), []
    for rows in (6, 3, 1):
        x = torch.randn(rows, 8)
        replay = recorder.record(lambda x=x: (x @ x.T).softmax(-1) @ x)
        assert torch.equal(replay(), (x @ x.T).softmax(-1) @ x)
        sizes.append(recorder.size_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


@torch.inference_mode()
def test_a_larger_recording_leaves_earlier_ones_their_memory() -> None:
    recorder = CallRecorder()
    inputs = [torch.randn(rows, 8) for rows in (2, 5)]
    replays = [recorder.record(lambda x=x: x.exp().sin()) for x in inputs]
    for replay, x in zip(replays, inputs, strict=True):
        assert torch.equal(replay(), x.exp().sin())


@torch.inference_mode()
def test_a_step_that_looks_at_a_value_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="not always the same work"):
        CallRecorder().record(lambda: x * 2 if x.sum().item() > 0 else x)
    assert torch.equal(CallRecorder().record(lambda: x + 1)(), x + 1)


@torch.inference_mode()
def test_calls_of_other_threads_are_not_kept() -> None:
    """An encoder may compute beside a decoder that records."""
    ops.enable()
    x, other = torch.randn(2, 32).bfloat16(), torch.randn(1, 32).bfloat16()

    def work() -> Tensor:
        thread = threading.Thread(target=lambda: ops.silu_mul(other))
        thread.start()
        thread.join()
        return ops.silu_mul(x)

    recorder = CallRecorder()
    replay = recorder.record(work)
    assert recorder.size_bytes == 2 * 16 * x.element_size()
    assert torch.equal(replay(), ops.silu_mul(x))
