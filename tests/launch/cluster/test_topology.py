"""Topologies: what is read, what is refused, and what is chosen for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from common.errors import TriptychError
from common.messages import WORKER_ROLES, Role
from common.model_info import ModelInfo, load_model_info
from launch.cli.app import WorkerRole
from launch.cluster.topology import LETTERS, Topology, choose_topology, parse_topology, usual_topology


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
        ("1e1pd", Topology(encoder=1, prefill_decode=1)),
        ("2e3pd", Topology(encoder=2, prefill_decode=3)),
        ("1pd", Topology(prefill_decode=1)),
        ("1pd2e", Topology(encoder=2, prefill_decode=1)),
        (" 1E1PD ", Topology(encoder=1, prefill_decode=1)),
        ("0e1pd", Topology(prefill_decode=1)),
        ("12e1pd", Topology(encoder=12, prefill_decode=1)),
        ("1epd", Topology(encode_prefill_decode=1)),
        ("1p1d", Topology(prefill=1, decode=1)),
        ("1e1p1d", Topology(encoder=1, prefill=1, decode=1)),
        ("2e2p3d", Topology(encoder=2, prefill=2, decode=3)),
        ("1e1p1d1pd", Topology(encoder=1, prefill=1, decode=1, prefill_decode=1)),
        ("epd", Topology(encode_prefill_decode=1)),
        ("pd", Topology(prefill_decode=1)),
        ("1e2epd", Topology(encoder=1, encode_prefill_decode=2)),
    ],
)
def test_reads_counts_of_roles(text: str, expected: Topology) -> None:
    assert parse_topology(text) == expected


def test_text_form_reads_back() -> None:
    for topology in (Topology(1, 0, 0, 1), Topology(prefill_decode=2), Topology(3, 4, 5, 6, 7)):
        assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0pd", "nothing would decode"),
        ("1e", "nothing would decode: add a prefill-decode worker"),
        ("1e1p", "hands its keys and values to a decode worker: add 1d"),
        ("1p1pd", "hands its keys and values to a decode worker: add 1d"),
        ("1e1d", "gets its keys and values from a prefill worker: add 1p"),
        ("1d1epd", "gets its keys and values from a prefill worker: add 1p"),
        ("1e1x", "no role 'x'; roles are e .encoder., p .prefill., d .decode., pd"),
        ("1ep1d", "no role 'ep'"),
        ("1pd1pd", "twice"),
        ("e1pd", "write a count before each role"),
        ("1e-1pd", "write a count before each role"),
        ("e", "nothing would decode"),
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
    assert str(usual_topology(pictures, cores=2)[0]) == "1e1pd"
    topology, why = usual_topology(text_only, cores=2)
    assert str(topology) == "1pd"
    assert "text-only" in why


@pytest.mark.parametrize(("cores", "expected"), [(2, "2e1pd"), (16, "2e1pd"), (1, "1e1pd"), (None, "1e1pd")])
def test_speech_gets_two_encoders_where_there_are_cores_for_them(
    tmp_path: Path, cores: int | None, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    topology, why = usual_topology(load_model_info(str(tmp_path)), cores)
    assert str(topology) == expected
    assert bool(why) == (expected == "2e1pd")


def test_topology_must_fit_the_model(pictures: ModelInfo, text_only: ModelInfo) -> None:
    for text in ("2pd", "1p1d", "1pd1epd"):
        with pytest.raises(TriptychError, match=f"use 1e{text}, or --encoder-fallback"):
            choose_topology(text, pictures)
    for text, fitting in (("1e2pd", "2pd"), ("1e1p1d", "1p1d"), ("1epd", "1pd"), ("2e1pd2epd", "3pd")):
        with pytest.raises(TriptychError, match=f"use {fitting}$"):
            choose_topology(text, text_only)


@pytest.mark.parametrize("text", ["1epd", "1e1epd", "1e1p1d1pd"])
def test_some_encoder_is_enough(text: str, pictures: ModelInfo) -> None:
    assert str(choose_topology(text, pictures)) == text


@pytest.mark.parametrize("text", ["2pd", "1p1d", "1pd1epd"])
def test_no_encoder_is_needed_where_prefill_workers_may_encode(text: str, pictures: ModelInfo) -> None:
    assert str(choose_topology(text, pictures, encoder_fallback=True)) == text


def test_decoders_come_first_because_they_start_slowest() -> None:
    assert Topology(encoder=2, prefill=1, decode=1, prefill_decode=1, encode_prefill_decode=1).workers() == [
        ("epd0", "encode_prefill_decode"),
        ("pd0", "prefill_decode"),
        ("d0", "decode"),
        ("p0", "prefill"),
        ("e0", "encoder"),
        ("e1", "encoder"),
    ]


def test_every_role_of_a_worker_has_its_letters_and_can_be_asked_for() -> None:
    assert list(LETTERS) == list(WORKER_ROLES) == list(get_args(WorkerRole))
    assert {*LETTERS, "proxy"} == set(get_args(Role))
