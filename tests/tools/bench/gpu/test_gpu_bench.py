"""Every benchmark of a GPU runs here at the size of a toy: what it measures means nothing, that it measures does."""

from __future__ import annotations

import gc
import os
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from common.model_info import load_model_info
from common.text.processor import TextProcessor
from engine.attention.select import choose_backend
from engine.attention.torch_backend import TorchBackend
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.models.base import DecoderModel
from engine.models.loading.skeleton import without_memory
from engine.state.spec import HeadSpec
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.plain_recorder import PlainRecorder
from tests.tools.gpu_check.whisper_shape import whisper_large_v3
from tools.bench.gpu import __main__ as bench
from tools.bench.gpu import attention, loads, serving
from tools.bench.gpu.attention import Attention
from tools.bench.gpu.engines import Driver, endless, make_decoder
from tools.bench.gpu.figures import HEADER, Figure, duration, durations, rate
from tools.bench.gpu.setup import Limits, Setup, attempted, measure_limits
from tools.bench.gpu.steps import measure_steps, prefill_flops, token_bytes, weight_bytes
from tools.gpu_check import environment
from tools.gpu_check.shapes import Shape, qwen2_5_vl_3b

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LIMITS = Limits(copy_bytes_per_s=1e10, matmul_flops_per_s=1e11)
CASES = {
    "decode": 2,
    "prefill": 1,
    "serving": 20,
    "gaps": 4,
    "window": 10,
}
"""How many figures each makes; the loads on two systems."""


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(CPU, LIMITS, tmp_path, toy=True, repetitions=2)


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_a_benchmark_measures(name: str, setup: Setup) -> None:
    before = engines()
    check_figures(list(bench.measure([name], setup)), [name])
    assert engines() <= before, "the next one in this process would have less memory"


@pytest.mark.cluster
def test_loads_are_measured_on_one_cluster(setup: Setup) -> None:
    check_figures(list(bench.measure([*bench.LOADS], setup)), [*bench.LOADS])


def check_figures(figures: list[Figure], names: list[str]) -> None:
    assert [figure.beside for figure in figures if figure.failed] == []
    assert Counter(figure.benchmark for figure in figures) == {name: CASES[name] for name in names}
    assert len({(figure.benchmark, figure.case, figure.unit) for figure in figures}) == len(figures)
    for figure in figures:
        assert 0 < figure.low <= figure.value <= figure.high
        assert (figure.limit is None) == (figure.share is None)
        assert (figure.limit is None) == ("TTFT" in figure.case or figure.unit == "turns/s")
        is_small = figure.case.startswith("batch 1,")
        assert (figure.goal is not None) == (figure.benchmark == "prefill" or is_small), figure.case
        assert figure.attention
        assert len(figure.cells()) == len(HEADER)


def engines() -> set[int]:
    """Those that are there."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if isinstance(one, DecoderEngine | EncoderEngine)}


def test_the_command_prints_a_table_and_writes_it_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n")
    command = [sys.executable, "-m", "tools.bench.gpu", "prefill", "--device", "cpu", "--toy", "--repetitions", "1"]
    run = subprocess.run([*command, "--write", str(page)], capture_output=True, text=True, timeout=120, check=True)
    table = [line for line in run.stdout.splitlines() if line.startswith("|")]  # logs stand between its rows
    assert [row.split(" | ")[0] for row in table[2:]] == ["| limits", "| limits", "| prefill"]
    assert page.read_text().startswith(f"before\n{bench.BEGIN}\n\nMeasured on 2")
    assert page.read_text().endswith("\n".join([*table, "", bench.END, "after", ""]))


def test_the_environment_is_told_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"torch {torch.__version__}" in environment.in_words()
    monkeypatch.setattr(environment, "_version", {"transformers": "5.17.0"}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [absent.split(" ")[0] for absent in environment.missing()] == ["flashinfer-python", "a"]


def test_the_share_of_a_limit_is_one_at_the_limit() -> None:
    assert duration("a", "b", [0.004], 0.004).share == 1.0
    assert rate("a", "b", "GB/s", [2.0], 6.0, limit=4.0).share == 0.75
    assert rate("a", "b", "GB/s", [2.0, 1.0, 4.0], 4.0) == Figure("a", "b", "GB/s", 2.0, 1.0, 4.0)


def test_a_part_that_fails_is_a_row_and_the_next_one_is_measured() -> None:
    def breaks() -> Iterator[Figure]:
        yield duration("decode", "batch 1", [0.001])
        raise RuntimeError("out of memory | 3 GiB\nwanted")

    figures = list(attempted("decode", "batch 8", breaks))
    figures += attempted("decode", "batch 64", lambda: [duration("decode", "batch 64", [0.001])])
    assert [(figure.case, figure.failed) for figure in figures] == [
        ("batch 1", False),
        ("batch 8", True),
        ("batch 64", False),
    ]
    assert len(figures[1].cells()) == len(HEADER)
    assert "RuntimeError: out of memory / 3 GiB wanted" in figures[1].cells()[-1]


def test_a_figure_names_the_attention_that_ran(setup: Setup, tmp_path: Path) -> None:
    heads, half = HeadSpec(4, 2, 64), torch.bfloat16
    with flashinfer_on_cpu():
        backend = choose_backend(CPU, half, heads=heads)
    assert attention.of_backend(backend, heads, half) == Attention("flashinfer")
    assert attention.of_backend(backend, replace(heads, head_dim=80), half) == Attention("torch"), "it gives that away"
    backend = TorchBackend(CPU)
    backend.is_fallback = True
    assert attention.of_backend(backend, heads, half) == Attention("torch", is_fallback=True)
    figure = Attention("torch", is_fallback=True).beside(duration("decode", "batch 1", [0.001], beside="1 GB to read"))
    assert figure.cells()[-1] == "1 GB to read; attention by torch, A FALLBACK"


def test_steps_that_are_not_the_recorded_ones_are_a_fallback(setup: Setup) -> None:
    engine = make_decoder(setup, qwen2_5_vl_3b, max_num_seqs=2, max_model_len=64, attention_backend="torch")
    engine.runner.record_graphs(PlainRecorder())
    name = engine.runner.backend.name
    [figure] = measure_steps(setup, engine, 2, 8, 4)
    assert figure.attention == name
    assert engine.runner.graphs is not None
    engine.runner.graphs.run = lambda *_: None  # type: ignore[method-assign]
    [figure] = measure_steps(setup, engine, 2, 8, 4)
    assert figure.attention == f"{name}, {4 * setup.repetitions + 1} steps launched anew"
    assert figure.is_fallback
    engine.runner.graphs, engine.runner.records_graphs, engine.runner.layers_are_fallback = None, True, True
    assert attention.of_decoder(engine) == Attention(f"{name}, small layers by PyTorch, no step recorded", True)


def test_mps_runs_for_the_processes_that_start_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(f'#!/bin/sh\necho "${{1-$(cat)}} ${{CUDA_MPS_PIPE_DIRECTORY##*/}}" >>{log}\n')
    control.chmod(0o755)
    before = dict(os.environ)
    with pytest.raises(FileNotFoundError, match="nvidia-cuda-mps-control"), serving.mps_daemon(tmp_path):
        pass
    assert dict(os.environ) == before
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with serving.mps_daemon(tmp_path):
        assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "mps-log")
    assert log.read_text().splitlines() == ["-d mps", "quit mps"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_large_pictures_keep_all_pixels_of_qwens_own_preprocessor() -> None:
    assert qwen2_5_vl_3b(toy=False).preprocessor["max_pixels"] == 16384 * 28 * 28
    assert {name: side**2 for name, side in loads.SIDES.items()} == {"4k": 3840 * 2160, "8k": 7680 * 4320}


def test_a_cluster_tells_of_the_worker_that_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"encoder-0": {"encoder_attention_fallback": 0.0}, "worker-0": {"attention_fallback": 0.0}}
    monkeypatch.setattr(attention, "gauges", lambda instance, _: told[instance.id])
    instances = {name: SimpleNamespace(id=name, role="worker") for name in told}
    cuda, cluster = torch.device("cuda"), Mock(instances=instances)
    assert attention.of_cluster(cluster, cuda) == Attention("the workers' choice")
    told["encoder-0"] = {"encoder_attention_fallback": 1.0}
    assert attention.of_cluster(cluster, cuda) == Attention("torch in the encoder", is_fallback=True)
    told["worker-0"] = {"attention_fallback": 0.0, "layers_fallback": 1.0, "steps_recorded": 0.0}
    words = "torch in the encoder, small layers by PyTorch, no step recorded"
    assert attention.of_cluster(cluster, cuda) == Attention(words, is_fallback=True)
    told["worker-0"] = {"steps_total": 3.0}
    with pytest.raises(RuntimeError, match="worker-0 does not tell"):
        attention.of_cluster(cluster, cuda)


def test_the_roofline_is_whichever_takes_longer() -> None:
    limits = Limits(copy_bytes_per_s=100.0, matmul_flops_per_s=1000.0)
    assert (limits.least_s(200.0), limits.bound(200.0, 0.0)) == (2.0, "bound by bytes")
    assert (limits.least_s(200.0, 3000.0), limits.bound(200.0, 3000.0)) == (3.0, "bound by arithmetic")


def test_limits_are_measured_where_they_count() -> None:
    limits, [copy, product] = measure_limits(CPU, toy=True, repetitions=1)
    assert limits.copy_bytes_per_s == pytest.approx(copy.value * 1e9)
    assert limits.matmul_flops_per_s == pytest.approx(product.value * 1e12)


def test_a_step_reads_the_weights_and_the_keys_and_values_of_its_tokens(setup: Setup) -> None:
    engine = make_decoder(setup, qwen2_5_vl_3b, max_num_seqs=2, max_model_len=64)
    assert weight_bytes(engine) == engine.runner.weight_bytes, "the embedding is the head"
    assert token_bytes(engine) == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, their size, bytes
    driver = Driver(engine)
    driver.add("one", list(range(5)), endless(3))
    driver.until(3)
    assert driver.num_tokens == {"one": 3}
    driver.abort_all()
    assert engine.is_empty()


def test_the_arithmetic_of_a_prefill_is_that_of_its_matrices(setup: Setup) -> None:
    engine = make_decoder(setup, qwen2_5_vl_3b, max_num_seqs=2, max_model_len=64)
    hidden, heads, kv_heads, head_dim, inner, layers, vocab = 64, 4, 2, 16, 96, 2, 512
    matrices = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    attention = 2 * layers * heads * head_dim * 10 * 10
    counted = prefill_flops(engine.runner.model, 10)
    assert counted == pytest.approx(2 * matrices * 10 + attention + 2 * vocab * hidden, rel=0.02)  # norms and biases


@pytest.mark.parametrize("make", [qwen2_5_vl_3b, whisper_large_v3])
def test_the_large_shapes_are_those_of_their_models(make: Callable[[], Shape], tmp_path: Path) -> None:
    info = load_model_info(str(make().write(tmp_path / "model")))
    expected = {"Qwen2_5_VLForConditionalGeneration": 3.09e9}.get(
        info.architecture, 0.91e9
    )  # of decoders; Whisper's has 32 layers
    with without_memory():
        model: DecoderModel = pkgutil.resolve_name(info.family.decoder)(info)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(expected, rel=0.02)


def test_every_token_of_a_shape_has_a_text_and_pictures_have_a_place(tmp_path: Path) -> None:
    info = load_model_info(str(qwen2_5_vl_3b(toy=True).write(tmp_path / "model")))
    text = TextProcessor(info)
    assert all(text.decode([token]) for token in range(405, info.vocab_size))
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert text.render_chat([{"role": "user", "content": parts}]).count(info.placeholder_token_id) == 1


def test_single_events_are_told_by_median_and_99th_percentile() -> None:
    figure = durations("serving", "TTFT", [0.001 * number for number in range(1, 201)])
    assert (figure.value, figure.low, figure.high) == pytest.approx((100.5, 1.0, 200.0))
    assert figure.beside == "p99 198 ms of 200"
