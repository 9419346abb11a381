"""How the workers of one GPU share its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.config import EngineConfig, Settings
from common.errors import TriptychError
from common.model_info import ModelInfo, load_model_info
from common.process.gpu_memory import PROCESS_BYTES, total_gpu_memory
from engine.models.checkpoint_index import CheckpointError
from engine.models.registry import load_decoder
from launch.cluster.plan import Plan
from launch.cluster.shares import BATCH_BYTES, split_gpu, split_memory, weight_bytes
from launch.cluster.topology import parse_topology
from tests.launch.cluster.weight_files import model_of
from tests.tiny_models import make_llama
from tests.tools.gpu_check.whisper_shape import whisper_large_v3
from tools.gpu_check.shapes import Shape, qwen2_5_vl_3b

CUDA = EngineConfig(device="cuda")
GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> ModelInfo:
    """An encoder of 1 GiB and a decoder of 6 in bfloat16, about a Qwen2.5-VL-3B."""
    return model_of(tmp_path, visual__blocks__0__w=GIB // 2, model__layers__0__w=3 * GIB)


def test_an_encoder_gets_what_it_needs_and_a_decoder_the_rest(model: ModelInfo) -> None:
    split = split_gpu(CUDA, parse_topology("1e1pd"), model, 80 * GIB)
    needed = (PROCESS_BYTES + GIB + BATCH_BYTES) / (80 * GIB)
    assert split["encoder"]["memory_fraction"] == pytest.approx(needed, abs=1e-4)
    assert split["prefill_decode"]["memory_fraction"] == pytest.approx(0.9 - needed, abs=2e-4)


def test_an_encoder_gets_more_where_its_process_takes_more(model: ModelInfo) -> None:
    engine, topology = CUDA.model_copy(update={"process_bytes": 2 * GIB}), parse_topology("1e1pd")
    split = split_gpu(engine, topology, model, 80 * GIB)
    assert split["encoder"]["memory_fraction"] == pytest.approx((3 * GIB + BATCH_BYTES) / (80 * GIB), abs=1e-4)
    with pytest.raises(TriptychError, match=r"take 8 GiB"):
        split_gpu(engine, topology, model, 10 * GIB)


def test_a_plan_counts_what_nixl_takes_of_the_gpu(
    model: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.cluster.shares.total_gpu_memory", lambda: 80 * GIB)
    monkeypatch.setattr("broker.transports.nixl.agent.module_name", lambda: "nixl_cu13")
    shares = []
    for transport in ("shm", "nixl"):
        settings = Settings(engine=CUDA, transport=transport, host="localhost")
        instances = Plan(settings, model, parse_topology("1e1pd")).instances("redis://localhost", tmp_path)
        [encoder] = [instance for instance in instances if instance.role == "encoder"]
        shares.append(float(encoder.command.environment["TRIPTYCH_ENGINE__MEMORY_FRACTION"]))
    assert 80 * 1024 * (shares[1] - shares[0]) == pytest.approx(192, abs=9)  # MiB; shares have four digits


@pytest.mark.parametrize("text", ["1e1pd", "2e1pd", "1e1p2d", "1epd", "2e1p1d1pd1epd"])
@pytest.mark.parametrize("fraction", [None, 0.8])
def test_all_shares_together_are_within_the_fraction(model: ModelInfo, text: str, fraction: float | None) -> None:
    topology = parse_topology(text)
    split = split_gpu(CUDA.model_copy(update={"memory_fraction": fraction}), topology, model, 140 * GIB)
    total = sum(topology.count(role) * share["memory_fraction"] for role, share in split.items())
    assert (fraction or 0.9) - 0.001 < total <= (fraction or 0.9)


def test_many_encoders_leave_the_decoder_half(model: ModelInfo) -> None:
    split = split_gpu(CUDA, parse_topology("8e1pd"), model, 40 * GIB)
    assert split["encoder"]["memory_fraction"] == pytest.approx(0.45 / 8, abs=1e-4)
    assert split["prefill_decode"]["memory_fraction"] == pytest.approx(0.45, abs=1e-4)


def test_weights_that_do_not_fit_a_share_are_an_error_with_the_numbers(model: ModelInfo) -> None:
    message = r"as 1e2pd, each prefill_decode worker gets 0\.\d+ of the GPU's 12 GiB, .* take 6\.75 GiB"
    with pytest.raises(TriptychError, match=message):
        split_gpu(CUDA, parse_topology("1e2pd"), model, 12 * GIB)


def test_a_gpu_whose_size_is_not_known_is_divided_all_the_same(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.cluster.shares.total_gpu_memory", lambda: None)
    split = split_memory(CUDA, parse_topology("1e1pd"), model)
    assert split["encoder"] == {"memory_fraction": 0.15}
    assert split["prefill_decode"] == {"memory_fraction": pytest.approx(0.75)}


@pytest.mark.parametrize(
    ("shape", "encoder", "decoder"),
    [(qwen2_5_vl_3b, 0.67e9, 3.09e9), (whisper_large_v3, 0.64e9, 0.91e9)],
    ids=["qwen2_5_vl", "whisper"],
)
def test_random_weights_count_although_there_are_no_files(
    tmp_path: Path, shape: Callable[[], Shape], encoder: float, decoder: float
) -> None:
    info = load_model_info(str(shape().write(tmp_path)))
    dummy = CUDA.model_copy(update={"load_format": "dummy"})
    assert weight_bytes(info, dummy, 1) == (pytest.approx(encoder, rel=0.02), pytest.approx(decoder, rel=0.02))
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors"):
        weight_bytes(info, CUDA, 1)
    topology = parse_topology("1e1pd")
    with pytest.raises(TriptychError, match=r"weights of .* take"):
        split_gpu(dummy, topology, info, 6 * GIB if info.media_kind != "audio" else 3 * GIB)
    assert split_gpu(dummy, topology, info, 80 * GIB)["prefill_decode"]["memory_fraction"] > 0.8


def test_without_a_gpu_there_is_no_size() -> None:
    assert total_gpu_memory("libcuda-that-nobody-has.so.1") is None


@pytest.mark.parametrize(
    "name",
    [
        "model__encoder__layers__0__w",
        "encoder__block__0__w",
        "visual__w",
        "model__visual__w",
        "vision_tower__vision_model__encoder__w",
        "model__vision_model__w",
        "multi_modal_projector__linear_1__w",
        "audio_tower__conv1__w",
        "model__connector__modality_projection__w",
    ],
)
def test_an_encoders_tensors_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    info = model_of(tmp_path, **{name: 5}, model__decoder__layers__0__encoder_attn__w=7, lm_head__weight=11)
    assert weight_bytes(info, CUDA, 2) == (10, 36)


def test_eight_bit_weights_count_a_byte_each_and_a_tied_embedding_twice(tmp_path: Path) -> None:
    info = load_model_info(str(make_llama(tmp_path / "llama")))
    _, rest = weight_bytes(info, CUDA.model_copy(update={"quantization": "int8"}), 2)
    _, num_bytes = load_decoder(info, torch.device("cpu"), torch.bfloat16, as_int8=True)
    assert rest == pytest.approx(num_bytes, rel=0.1)
