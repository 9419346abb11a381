"""The adapters in memory: within their number, the least recently used goes, and what a step needs is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from common.model_info import load_model_info
from engine.models.base import DecoderModel
from engine.models.lora.pool import AdapterPool
from engine.models.lora.weights import AdapterFiles
from engine.models.registry import make_decoder
from tests.tiny.lora import write_adapter

NAMES = "abcde"
PREFIX = "base_model.model.model.layers.1"
SIZES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


@pytest.fixture(scope="module")
def decoder_and_files(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DecoderModel, AdapterFiles, list[str]]:
    folder, modules = tmp_path_factory.mktemp("adapters"), []
    for number, name in enumerate(NAMES):
        (rows, columns), target = list(SIZES.values())[number % 4], list(SIZES)[number % 4]
        tensors = {
            f"{PREFIX}.{target}.lora_A.weight": torch.full((number + 1, columns), float(number)),
            f"{PREFIX}.{target}.lora_B.weight": torch.ones(rows, number + 1),
        }
        modules.append(f"{name}={write_adapter(folder / name, tensors)}")
    info = load_model_info(str(llama), modules)
    return make_decoder(info), AdapterFiles(make_decoder(info), info), modules


def make_pool(llama: Path, modules: list[str], max_loras: int) -> AdapterPool:
    info = load_model_info(str(llama), modules)
    return AdapterPool(make_decoder(info), info, max_loras, torch.device("cpu"), torch.float32)


@given(data=st.data(), max_loras=st.integers(1, 4))
@settings(max_examples=60)
def test_what_is_needed_stays_and_the_least_recently_used_goes(
    llama: Path,
    decoder_and_files: tuple[DecoderModel, AdapterFiles, list[str]],
    data: st.DataObject,
    max_loras: int,
) -> None:
    pool = make_pool(llama, decoder_and_files[2], max_loras)
    model: list[str] = []  # least recently used first
    for _ in range(data.draw(st.integers(1, 12))):
        needed = data.draw(st.lists(st.sampled_from(NAMES), max_size=max_loras, unique=True))
        kept = {name: pool.loaded[name] for name in needed if name in pool.loaded}
        assert pool.load(needed) == {}
        needed.sort(key=lambda name: name not in model)  # in one step there is no earlier and later
        model = [name for name in model if name not in needed] + needed
        model = model[-max_loras:]
        assert set(pool.loaded) == set(model)
        assert all(pool.loaded[name] is weights for name, weights in kept.items()), "not read again"
        counters = pool.counters
        assert counters["adapter_loads"] - counters["adapter_evictions"] == len(pool.loaded)
        sizes = [sum(one.nbytes for pair in weights.values() for one in pair) for weights in pool.loaded.values()]
        assert sum(sizes) <= pool.capacity_bytes


def test_the_parts_of_a_fused_layer_stand_at_their_rows(
    decoder_and_files: tuple[DecoderModel, AdapterFiles, list[str]],
) -> None:
    _, files, _ = decoder_and_files
    weights = files.load("b", torch.device("cpu"), torch.float32)  # v_proj: behind 64 rows of q and 32 of k
    [(name, (down, up))] = weights.items()
    assert name == "layers.1.qkv_proj"
    assert down.shape == (2, 64)
    assert torch.equal(up[:96], torch.zeros(96, 2))
    assert torch.equal(up[96:], torch.full((32, 2), 8 / 2)), "alpha 8 over rank 2"


def test_quantised_layers_have_the_same_parts(decoder_and_files: tuple[DecoderModel, AdapterFiles, list[str]]) -> None:
    """A weight that is kept small is no parameter any more."""
    model, files, _ = decoder_and_files
    for name in files.layers:
        del model.get_submodule(name).weight
    assert AdapterFiles(model, files._info)._parts == files._parts


def test_a_failed_load_leaves_the_others_alone(llama: Path, tmp_path: Path) -> None:
    modules = []
    for name in "ab":
        tensors = {f"{PREFIX}.mlp.up_proj.lora_A.weight": torch.ones(1, 64)}
        tensors[f"{PREFIX}.mlp.up_proj.lora_B.weight"] = torch.ones(96, 1)
        modules.append(f"{name}={write_adapter(tmp_path / name, tensors)}")
    pool = make_pool(llama, modules, 2)
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.rename(tmp_path / "elsewhere")
    failed = pool.load(["a", "b"])
    assert [*failed] == ["a"]
    assert "'a'" in failed["a"].message
    assert [*pool.loaded] == ["b"]
    (tmp_path / "elsewhere").rename(file)
    assert pool.load(["a", "b"]) == {}


def test_a_layer_without_groups_is_left_as_it_is(
    llama: Path, decoder_and_files: tuple[DecoderModel, AdapterFiles, list[str]]
) -> None:
    pool = make_pool(llama, decoder_and_files[2], 1)
    layer = nn.Linear(2, 2)
    output = torch.ones(1, 2)
    pool._add("layers.0.qkv_proj", layer, (torch.ones(1, 2),), output)
    assert torch.equal(output, torch.ones(1, 2))
