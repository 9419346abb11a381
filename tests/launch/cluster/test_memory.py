"""How the workers of one host share its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import EngineConfig, Settings
from common.errors import TriptychError
from launch.cluster.plan import make_plan
from launch.cluster.shares import split_memory
from launch.cluster.topology import Topology, parse_topology
from tests.launch.cluster.weight_files import model_of

CPU = EngineConfig(device="cpu")
GIB = 2**30


@pytest.mark.parametrize("text", ["1e1pd", "2e3pd", "1pd", "1epd", "2e1p3d"])
def test_all_shares_and_weights_together_are_within_the_fraction(tmp_path: Path, text: str) -> None:
    info, topology = model_of(tmp_path, w=4 * 2**20), parse_topology(text)
    split = split_memory(CPU.model_copy(update={"memory_fraction": 0.6}), topology, info, available=GIB)
    total = sum(topology.count(role) * share["memory_bytes"] for role, share in split.items())
    decoders = topology.prefill + topology.decode + topology.prefill_decode + topology.encode_prefill_decode
    left = GIB - 16 * 2**20 * max(topology.encoder, decoders)
    assert 0.6 * left - 8 <= total <= 0.6 * left
    assert split["prefill_decode"]["memory_bytes"] == pytest.approx(3 * split["encoder"]["memory_bytes"], abs=4)


def test_an_encoder_to_fall_back_on_has_weights_too(tmp_path: Path) -> None:
    """Both parts of the weights, whose sizes are not known here, are then where only the decoder's was."""
    info = model_of(tmp_path, w=2**20)
    room = 4 * 2**20 + 2**10
    assert split_memory(CPU, parse_topology("1e2pd"), info, available=room)
    with pytest.raises(TriptychError, match=r"take 0\.00781 GiB as 1e2pd"):
        split_memory(CPU, parse_topology("1e2pd"), info, available=room, encoder_fallback=True)


def test_weights_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    info, topology = model_of(tmp_path, w=1000), parse_topology("1e1pd")
    (tmp_path / "other.safetensors").write_bytes(b"damaged")
    for engine, size_bytes in ((CPU, 4000), (CPU.model_copy(update={"dtype": "bfloat16"}), 2000)):
        assert split_memory(engine, topology, info, available=size_bytes + 1)
        with pytest.raises(TriptychError, match=r"GiB free"):
            split_memory(engine, topology, info, available=size_bytes)


def test_weights_that_are_more_than_the_memory_are_an_error_that_names_both(tmp_path: Path) -> None:
    info = model_of(tmp_path, w=2**30)
    with pytest.raises(TriptychError, match=r"take 4 GiB as 1e1pd, this machine has 3 GiB free"):
        split_memory(CPU, Topology(encoder=1, prefill_decode=1), info, available=3 * GIB)


def test_what_a_user_gives_each_worker_is_left_alone(tmp_path: Path) -> None:
    given = CPU.model_copy(update={"memory_bytes": 5})
    assert not any(
        split_memory(given, Topology(encoder=1, prefill_decode=1), model_of(tmp_path, w=8), available=GIB).values()
    )


def test_every_worker_of_a_plan_is_told_its_share(tmp_path: Path) -> None:
    plan = make_plan(Settings(model="signpost", port=0, engine=CPU), "1e1pd")
    told = {
        instance.id: instance.command.environment.get("TRIPTYCH_ENGINE__MEMORY_BYTES")
        for instance in plan.instances("redis://127.0.0.1:1", tmp_path)
    }
    assert told["proxy"] is None
    assert int(told["pd0"] or 0) > int(told["e0"] or 0) > 0
