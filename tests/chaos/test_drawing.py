"""The matrix has every kind of fault, and a round is allowed to lose what the design says and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from launch.cluster.topology import parse_topology
from tests.chaos.drawing import CUTS_S, STOPS_S, WORKERS, draw_faults, matrix
from tests.chaos.faults import CUTS, Fault, allowed_endings, irreplaceable

ROLES = dict(parse_topology("2e2p2d2pd").workers())


def cluster_of(topology: str) -> Any:
    ids = [*parse_topology(topology).workers(), ("proxy", "proxy")]
    return SimpleNamespace(instances={i: SimpleNamespace(id=i, role=role) for i, role in ids})


def test_the_matrix_has_every_role_alone_and_in_pairs_under_both_signals() -> None:
    names = {str(cell) for cell in matrix()}
    assert len(names) == len(matrix())
    everybody = (*WORKERS, "proxy", "broker")
    for one in everybody:
        assert {f"kill {one}", f"stop {one}"} <= names
        for other in everybody[everybody.index(one) + 1 :]:
            assert {f"{a} {one}, {b} {other}" for a in ("kill", "stop") for b in ("kill", "stop")} <= names
    for role in WORKERS:
        assert {f"kill {role}, kill other_{role}", f"stop {role}, stop other_{role}"} <= names
        assert {f"{mode} {way}" for mode in CUTS for way in (f"{role}>broker", f">{role}", f"<>{role}")} <= names
    assert {"flush broker", "restart broker", *(f"{mode} proxy>broker" for mode in CUTS)} <= names


def test_a_cell_is_drawn_on_workers_of_its_roles_and_lasts_long_enough() -> None:
    rng = random.Random(1)
    for cell in matrix():
        faults = cell.draw(rng, ROLES)
        assert [fault.kind for fault in faults] == [kind for kind, _ in cell.parts]
        for fault in faults:
            assert fault.hit <= {*ROLES, "proxy", "broker"}
            if fault.kind == "stop":
                assert STOPS_S[0] <= fault.seconds <= STOPS_S[1]
            if fault.kind in CUTS:
                assert CUTS_S[0] <= fault.seconds <= CUTS_S[1]
        assert len(set().union(*(fault.hit for fault in faults))) == sum(len(fault.hit) for fault in faults)


def test_drawn_faults_name_what_there_is() -> None:
    rng = random.Random(2)
    drawn = [fault for _ in range(500) for fault in draw_faults(rng, [*ROLES, "proxy"], 10.0)]
    assert all(fault.hit <= {*ROLES, "proxy", "broker"} for fault in drawn)
    assert {fault.kind for fault in drawn} == {"kill", "stop", "flush", "restart", *CUTS}
    assert {fault.target for fault in drawn} >= {"proxy", "proxy>broker", "e0>broker", ">e0", "<>e0", "broker"}


@pytest.mark.parametrize(
    ("topology", "targets", "lost"),
    [
        ("2e2p2d", ["e0>broker"], []),  # others reach the broker
        ("2e2p2d", ["<>e0", "d1"], []),
        ("2e2p2d", ["e0", "e1"], ["e0", "e1"]),
        ("2e2p2d", ["<>p0,p1"], ["p0", "p1"]),
        ("1e1p1d1pd", ["d0", "p0"], []),  # who does both takes over
        ("1e1p1d1pd", ["pd0"], []),
        ("1e1p1d1pd", ["pd0", "d0>broker"], ["pd0", "d0"]),
        ("1e1pd", [">e0"], ["e0"]),
        ("1epd", ["epd0"], ["epd0"]),
        ("2e2p2d", ["proxy", "broker"], []),
    ],
)
def test_only_what_nobody_else_can_do_is_irreplaceable(topology: str, targets: Sequence[str], lost: list[str]) -> None:
    faults = [Fault("drop" if ">" in target else "kill", target, 0.0) for target in targets]
    assert irreplaceable(faults, cluster_of(topology)) == set(lost)


@pytest.mark.parametrize(
    ("topology", "faults", "allowed"),
    [
        ("2e2p2d", [Fault("reset", "e0>broker", 0.0)], {"whole"}),
        ("2e2p2d", [Fault("drop", "proxy>broker", 0.0)], {"whole"}),
        ("2e2p2d", [Fault("stop", "proxy", 0.0)], {"whole"}),
        ("2e2p2d", [Fault("kill", "proxy", 0.0)], {"whole", "closed"}),
        ("2e2p2d", [Fault("kill", "e0", 0.0), Fault("kill", "d1", 0.0)], {"whole"}),
        ("2e2p2d", [Fault("flush", "broker", 0.0)], {"whole", "refused"}),
        ("1e1pd", [Fault("stop", "e0", 0.0)], {"whole", "refused"}),
    ],
)
def test_a_refusal_is_allowed_where_nobody_could_take_over(
    topology: str, faults: list[Fault], allowed: set[str]
) -> None:
    assert allowed_endings(faults, cluster_of(topology)) == allowed
