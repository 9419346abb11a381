"""How memory is divided: budgets, pools measured and given, what a step takes, and that a process stays within."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from common.config import EngineConfig
from common.errors import TriptychError
from common.model_info import load_model_info
from common.process.host_memory import available_memory
from engine.core import encoder_profile
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.core.encoder_profile import BatchProfile
from engine.device.gpu_memory import GpuMemory
from engine.device.memory import DecoderNeeds, memory_budget, size_decoder, staging_budget, zeros
from engine.device.memory_profiler import PeakMemory, extrapolate, one_layer_of_each_stack
from engine.llm import LLM
from tests import tiny_models
from tests.tiny.qwen import make_qwen3_asr

MIB = 2**20
CPU = torch.device("cpu")
NEEDS = DecoderNeeds(block=MIB, request=2 * MIB, all_requests=4000 * MIB, input=10 * MIB, all_inputs=640 * MIB)
TEXT_NEEDS = DecoderNeeds(block=MIB, request=2 * MIB, all_requests=4000 * MIB, input=0, all_inputs=0)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen2_5_vl(tmp_path_factory.mktemp("models") / "qwen2_5_vl")


# --- what there is


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def machine(folder: Path, cgroup: str, available_kib: int = 8 * 2**20) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup of one's own."""
    proc = folder / "proc"
    write(proc, meminfo=f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB")
    write(proc / "self", cgroup=cgroup)
    return proc, folder / "cgroup"


def test_without_limits_the_kernels_own_figure_counts(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/", available_kib=1000)
    assert available_memory(proc, groups) == 1000 * 1024


def test_the_tightest_group_around_a_process_counts_and_unused_file_pages_are_free(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/outer/inner")
    write(groups / "outer/inner", memory__max="max", memory__current=5000)
    write(groups / "outer", memory__max=9000, memory__current=6000, memory__stat="anon 1\ninactive_file 700")
    assert available_memory(proc, groups) == 9000 - 6000 + 700


def test_limits_of_the_older_groups_count_too(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "5:cpu:/x\n4:memory,hugetlb:/x\n0::/")
    limits = {"memory__limit_in_bytes": 4096, "memory__usage_in_bytes": 1000}
    write(groups / "memory/x", **limits, memory__stat="total_inactive_file 24")
    assert available_memory(proc, groups) == 4096 - 1000 + 24


def test_a_container_whose_path_is_the_hosts_reads_its_own_root(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/docker/0123456789")
    write(groups, memory__max=7000, memory__current=2000)
    assert available_memory(proc, groups) == 5000


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/")
    write(groups, memory__max=1000, memory__current=2000)
    assert available_memory(proc, groups) == 0


# --- how it is divided


def test_a_given_budget_goes_before_a_share_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.memory.available_memory", lambda: 1000 * MIB)
    assert memory_budget(EngineConfig(memory_bytes=7), CPU) == 7
    assert memory_budget(EngineConfig(), CPU) == 500 * MIB
    assert memory_budget(EngineConfig(memory_fraction=0.25), CPU) == 250 * MIB
    assert staging_budget(EngineConfig(memory_bytes=8 * MIB)) == 2 * MIB


def test_pools_and_step_add_up_to_the_budget() -> None:
    report = size_decoder(EngineConfig(memory_bytes=1000 * MIB), NEEDS, CPU, weights=0, activation=200 * MIB)
    assert report.budget == 1000 * MIB
    assert report.kv_cache + report.encoder_cache + report.swap + 200 * MIB == 1000 * MIB
    assert report.swap == 50 * MIB, "a sixteenth of what is left"
    assert report.encoder_cache == 750 * MIB // 8
    assert report.given == {"memory_budget"}


def test_no_pool_is_larger_than_what_could_be_used() -> None:
    report = size_decoder(EngineConfig(memory_bytes=2**40), NEEDS, CPU, weights=0, activation=0)
    assert (report.kv_cache, report.encoder_cache, report.swap) == (4000 * MIB, 640 * MIB, 128 * MIB)
    text = size_decoder(EngineConfig(memory_bytes=2**40), TEXT_NEEDS, CPU, weights=0, activation=0)
    assert text.encoder_cache == 0


def test_what_is_given_is_kept_and_the_rest_shares_what_is_left() -> None:
    config = EngineConfig(memory_bytes=1000 * MIB, encoder_cache_bytes=300 * MIB, swap_bytes=0)
    report = size_decoder(config, NEEDS, CPU, weights=0, activation=100 * MIB)
    assert (report.kv_cache, report.encoder_cache, report.swap) == (600 * MIB, 300 * MIB, 0)
    assert report.given == {"memory_budget", "encoder_cache", "swap"}


def test_a_backend_that_copies_what_it_reads_gets_room_for_it() -> None:
    needs = DecoderNeeds(block=MIB, request=MIB, all_requests=10**12, input=0, all_inputs=0, decode_share=0.5)
    report = size_decoder(EngineConfig(memory_bytes=300 * MIB, swap_bytes=0), needs, CPU, weights=0, activation=0)
    assert report.kv_cache == 200 * MIB


def test_too_little_for_one_request_is_an_error_with_the_numbers() -> None:
    with pytest.raises(TriptychError) as caught:
        size_decoder(EngineConfig(memory_bytes=101 * MIB), TEXT_NEEDS, CPU, weights=5 * MIB, activation=100 * MIB)
    message = caught.value.info.message
    for part in ("101 MiB", "weights (5 MiB)", "100 MiB for a step of 1024 tokens", "needs 2 MiB", "--memory-fraction"):
        assert part in message


def test_an_encoder_batch_shrinks_to_what_fits() -> None:
    profile = BatchProfile(smallest=MIB, largest=80 * MIB, num_items=8, item_bytes=100)
    assert [profile.items_within(budget * MIB) for budget in (200, 80, 79, 25, 1)] == [8, 8, 7, 2, 1]
    assert [profile.bytes_of(items) for items in (20, 8, 2)] == [80 * MIB, 80 * MIB, 20 * MIB]
    ahead = replace(profile, item_bytes=2 * MIB).with_outputs_of_another()
    assert ahead.largest == 96 * MIB, "outputs of the batch before are still there"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_an_encoder_takes_is_not_the_decoders(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is loaded first, and is idle when the decoder's pools are sized."""
    monkeypatch.setattr("engine.device.memory.available_memory", lambda: 1000 * MIB)
    monkeypatch.setattr("engine.device.memory.measure_gpu", lambda _: GpuMemory(2000 * MIB, 1600 * MIB, 100 * MIB))
    config = EngineConfig(swap_bytes=0, memory_fraction=0.9)
    alone, beside = (
        size_decoder(config, TEXT_NEEDS, torch.device(device), weights=0, activation=50 * MIB, beside=taken)
        for taken in (0, 300 * MIB)
    )
    assert alone.budget is not None
    assert beside.budget == alone.budget - 300 * MIB
    assert beside.kv_cache == alone.kv_cache - 300 * MIB > 0
    with pytest.raises(TriptychError, match="900 MiB for the encoder and adapters beside it"):
        size_decoder(config, TEXT_NEEDS, torch.device(device), 0, 50 * MIB, beside=900 * MIB)


def test_both_engines_of_a_process_stay_within_its_memory(vision: Path) -> None:
    llm = LLM(vision, device="cpu", memory_bytes=256 * MIB)
    assert llm.encoder is not None
    assert llm.encoder.memory.budget == 64 * MIB, "a quarter of it for batches, at most"
    assert 0 < llm.encoder.taken_bytes <= 64 * MIB
    assert llm.decoder.runner.memory.budget == 256 * MIB - llm.encoder.taken_bytes


# --- what is measured


@linux_only
def test_the_peak_of_a_block_is_measured_also_when_it_is_free_again() -> None:
    with PeakMemory(CPU) as peak:
        torch.ones(64 * MIB // 4).sum()
    assert peak.size_bytes is not None
    assert 60 * MIB < peak.size_bytes < 100 * MIB


@linux_only
def test_zeros_take_memory_only_where_they_are_written() -> None:
    with PeakMemory(CPU) as peak:
        tensor = zeros((2, 256, 2**16), torch.bfloat16, CPU)
        assert tensor.dtype is torch.bfloat16
        assert not tensor[0, 3].any()
        tensor[0, :2] = 1
    assert float(tensor[0].float().sum()) == 2 * 2**16
    assert peak.size_bytes is not None
    assert peak.size_bytes < tensor.nbytes / 2


def test_what_libraries_take_once_is_not_scaled() -> None:
    """Of three images the first one brings 30 MiB that stay."""
    sizes = [(16, 31 * MIB), (64, 4 * MIB), (256, 16 * MIB)]
    assert extrapolate(sizes, 256) == 16 * MIB
    assert extrapolate(sizes, 4096) == 256 * MIB
    assert extrapolate(sizes[:1], 32) == 62 * MIB, "of a single one nothing else is known"
    assert extrapolate([(64, 20 * MIB), (256, 16 * MIB)], 4096) == 16 * MIB
    assert extrapolate([(64, 20 * MIB), (64, 30 * MIB)], 64) == 30 * MIB


def test_a_late_pass_ends_behind_the_first_layer_and_a_timely_one_goes_through() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
            self.num_done = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                self.num_done += 1
            return x

    stack = Stack()
    with one_layer_of_each_stack(stack, deadline_s=0.0):
        stack(torch.zeros(1))
    assert stack.num_done == 1
    with one_layer_of_each_stack(stack, deadline_s=time.monotonic() + 1000):
        stack(torch.zeros(1))
    stack(torch.zeros(1))
    assert stack.num_done == 7, "nothing is left behind that would stop a pass"


@linux_only
def test_a_larger_step_takes_more_and_leaves_less_for_the_cache(llama: Path) -> None:
    info = load_model_info(str(llama))
    small, large = (
        DecoderEngine(info, EngineConfig(device="cpu", memory_bytes=64 * MIB, max_num_batched_tokens=tokens)).stats()
        for tokens in (64, 8192)
    )
    assert small["memory_activation_measured"] == large["memory_activation_measured"] == 1
    assert small["memory_activation_bytes"] < large["memory_activation_bytes"]
    for stats in (small, large):
        assert stats["kv_cache_bytes"] >= stats["kv_blocks_usable"] * stats["kv_block_bytes"]
        taken = stats["kv_cache_bytes"] + stats["swap_bytes"] + stats["memory_activation_bytes"]
        assert taken <= stats["memory_budget_bytes"] == 64 * MIB
        assert (stats["kv_cache_given"], stats["memory_budget_given"]) == (0, 1)


def test_where_every_size_is_given_nothing_is_measured(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runner.profile.measure_step", lambda *_: pytest.fail("measured"))
    config = EngineConfig(device="cpu", kv_cache_bytes=MIB, encoder_cache_bytes=3 * MIB, swap_bytes=2 * MIB)
    stats = DecoderEngine(load_model_info(str(llama)), config).stats()
    assert [stats[f"{name}_bytes"] for name in ("kv_cache", "encoder_cache", "swap")] == [MIB, 3 * MIB, 2 * MIB]
    assert [stats[f"{name}_given"] for name in ("kv_cache", "encoder_cache", "swap")] == [1, 1, 1]


def test_measuring_leaves_the_engine_as_it_was(vision: Path) -> None:
    engine = DecoderEngine(load_model_info(str(vision)), EngineConfig(device="cpu"))
    engine.check_integrity()
    assert engine.is_empty()
    assert not any(cache.any() for cache in engine.runner.caches)


@linux_only
@pytest.mark.parametrize(
    ("prompt", "least", "rows"),
    [(2048, 56, 1024), (2048, 448, 1024), (512, 56, 512)],
    ids=["as large as the preprocessor makes them", "where small ones are enlarged", "as large as a prompt may be"],
)
def test_images_too_large_to_be_tried_in_time_are_planned(
    prompt: int, least: int, rows: int, vision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = load_model_info(str(vision))
    text = {**info.config["text_config"], "max_position_embeddings": prompt}
    sizes = {"min_pixels": least**2, "max_pixels": 896**2}
    info = replace(info, config={**info.config, "text_config": text}, preprocessor={**info.preprocessor, **sizes})
    monkeypatch.setattr(encoder_profile, "TIME_S", 0.0)
    profile = EncoderEngine(info, EngineConfig(device="cpu", dtype="float32")).profile
    if profile is None:
        pytest.skip("the kernel does not let a process measure itself")
    assert profile.item_bytes == rows * 4 * text["hidden_size"]


@linux_only
def test_clips_of_ten_minutes_are_planned_where_they_are_taken(tmp_path: Path) -> None:
    info = load_model_info(str(make_qwen3_asr(tmp_path / "qwen3_asr", max_position_embeddings=8192)))
    profile = EncoderEngine(info, EngineConfig(device="cpu", dtype="float32")).profile
    if profile is None:
        pytest.skip("the kernel does not let a process measure itself")
    assert profile.item_bytes == 600 * 13 * 4 * info.text_config["hidden_size"]


def test_an_encoder_without_room_for_its_smallest_item_does_not_start(vision: Path) -> None:
    info = load_model_info(str(vision))
    stats = EncoderEngine(info, EngineConfig(device="cpu")).stats()
    if not stats["memory_activation_measured"]:
        pytest.skip("the kernel does not let a process measure itself")
    assert (
        stats["encoder_computations"] == EncoderEngine(info, EngineConfig(device="cpu")).stats()["encoder_computations"]
    ), "what is computed to be measured is not counted"
    with pytest.raises(TriptychError, match="its smallest item needs"):
        EncoderEngine(info, EngineConfig(device="cpu", memory_bytes=1))


# --- the whole process

_DECODER = """
import json, sys
from pathlib import Path
from common.process.malloc import reuse_large_blocks, use_one_arena
use_one_arena()
reuse_large_blocks()
from common.config import EngineConfig
from common.messages import Generate
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
import services.roles.decoder, services.worker_process
engine = DecoderEngine(load_model_info(sys.argv[1]), EngineConfig(**json.loads(sys.argv[2])))
for number in range(32):
    prompt = [(7 * number + place) % 250 for place in range(400 + number)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add_request(Generate(f"r{number}", prompt, [], params))
answered = 0
while answered < 32:
    answered += sum(getattr(event, "done", False) for event in engine.step())
print(json.dumps(engine.stats()))
print(Path("/proc/self/status").read_text())
"""

_ENCODER = """
import json, sys
from pathlib import Path
from common.process.malloc import use_one_arena
use_one_arena()
from common.config import EngineConfig
from common.model_info import load_model_info
from engine.core.encoder_engine import EncoderEngine
from engine.core.encoder_profile import _silence
from engine.device.memory_profiler import release_free_memory
from engine.processors import init_worker, process
import services.roles.encoder, services.worker_process
info = load_model_info(sys.argv[1])
engine = EncoderEngine(info, EngineConfig(**json.loads(sys.argv[2])))
clip = _silence(16000, 30)
init_worker(sys.argv[1], str(engine.dtype).removeprefix("torch."))
window = process("audio", clip)
release_free_memory(engine.device)  # a worker preprocesses in other processes
for number in range(4):
    engine.submit((f"r{number}", 0, 0), window)
while engine.has_work():
    assert all(result.tensor is not None for result in engine.step())
print(json.dumps(engine.stats()))
print(Path("/proc/self/status").read_text())
"""


def run_alone(program: str, folder: Path, **config: object) -> tuple[dict[str, float], int]:
    """The engine's numbers at its end, and the most memory of its own that its process has had, libraries apart."""
    command = [sys.executable, "-c", program, str(folder), json.dumps({"device": "cpu", "num_threads": 1, **config})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    numbers, status = result.stdout[result.stdout.index("\n{") + 1 :].split("\n", 1)
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.endswith("kB")}
    own = 1024 * (kib["VmHWM"] - kib["RssFile"])
    print(f"own {own / 1e6:.0f} MB, libraries {kib['RssFile'] / 1024:.0f} MiB, {numbers}")
    return json.loads(numbers), own


@linux_only
@pytest.mark.slow
def test_a_decoder_process_stays_within_weights_pools_and_300_mb(tmp_path: Path) -> None:
    """SmolLM2's layers, two of them, and 32 prompts of 400 tokens at once: more than the pool holds."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 32768}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
    folder = tiny_models.make_llama(tmp_path / "llama", **sizes, **heads)
    stats, peak = run_alone(_DECODER, folder, kv_cache_bytes=32 * MIB, swap_bytes=16 * MIB)
    assert stats["memory_weights_bytes"] > 95e6
    assert stats["generated_tokens_total"] == 32 * 4
    pools = stats["kv_cache_bytes"] + stats["encoder_cache_bytes"] + stats["swap_bytes"]
    assert peak < stats["memory_weights_bytes"] + pools + 300e6


@linux_only
@pytest.mark.slow
def test_an_encoder_process_stays_within_weights_batch_and_330_mb(tmp_path: Path) -> None:
    """Whisper tiny's encoder with four full windows waiting. Importing transformers' modules takes 108 MB of it, which
    a decoder does not need."""
    sizes = {"d_model": 384, "encoder_layers": 4, "encoder_ffn_dim": 1536, "encoder_attention_heads": 6}
    folder = tiny_models.make_whisper(tmp_path / "whisper", **sizes, decoder_attention_heads=6)
    stats, peak = run_alone(_ENCODER, folder)
    assert stats["encoder_items_total"] == 4
    assert stats["memory_weights_bytes"] > 28e6
    assert peak < stats["memory_weights_bytes"] + stats["memory_activation_bytes"] + 330e6
