"""Topologies: what is read, what is refused, and what is chosen for a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import TriptychError
from common.model_info import ModelInfo, load_model_info
from launch.topology import Topology, choose_topology, parse_topology


@pytest.fixture
def pictures() -> ModelInfo:
    return load_model_info("signpost")


@pytest.fixture
def text_only(tmp_path: Path) -> ModelInfo:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return load_model_info(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e1pd", Topology(1, 1)),
        ("2e3pd", Topology(2, 3)),
        ("1pd", Topology(0, 1)),
        ("1pd2e", Topology(2, 1)),
        (" 1E1PD ", Topology(1, 1)),
        ("0e1pd", Topology(0, 1)),
        ("12e1pd", Topology(12, 1)),
    ],
)
def test_reads_counts_of_roles(text: str, expected: Topology) -> None:
    assert parse_topology(text) == expected


def test_text_form_reads_back() -> None:
    for topology in (Topology(1, 1), Topology(0, 2), Topology(3, 4)):
        assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0pd", "at least 1pd"),
        ("1e", "add a prefill-decode worker"),
        ("1e1p1d", "not available in this version"),
        ("1epd", "not available in this version"),
        ("1e1x", "no role 'x'"),
        ("1pd1pd", "twice"),
        ("e1pd", "write a count before each role"),
        ("1e-1pd", "write a count before each role"),
        ("", "write a count before each role"),
        ("1e1pd;rm", "write a count before each role"),
        ("900e1pd", "more than the 64"),
    ],
)
def test_refuses_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(TriptychError, match=reason) as raised:
        parse_topology(text)
    assert repr(text) in raised.value.info.message


def test_default_follows_the_model(pictures: ModelInfo, text_only: ModelInfo) -> None:
    assert str(choose_topology(None, pictures)) == "1e1pd"
    assert str(choose_topology(None, text_only)) == "1pd"


def test_topology_must_fit_the_model(pictures: ModelInfo, text_only: ModelInfo) -> None:
    with pytest.raises(TriptychError, match="use 1e2pd"):
        choose_topology("2pd", pictures)
    with pytest.raises(TriptychError, match="use 2pd"):
        choose_topology("1e2pd", text_only)


def test_decoders_come_first_because_they_start_slowest() -> None:
    assert Topology(2, 1).workers() == [("pd0", "prefill_decode"), ("e0", "encoder"), ("e1", "encoder")]
