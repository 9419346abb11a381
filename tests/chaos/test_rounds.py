"""Kills, stops and cuts under load: a few that are always made, and as many drawn ones as CHAOS_ROUNDS says.

`make chaos` makes the long run. Every drawn round prints what it does; CHAOS_SEED=N makes the same ones again.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos.drawing import draw_faults
from tests.chaos.faults import Fault
from tests.chaos.harness import IN_FLIGHT, ChaosHarness

SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
STOP_S = float(os.environ.get("CHAOS_STOP_S", "10"))
"""Of each setup. A process stands still, and a cable is cut, for up to so many seconds."""
SETUPS = (
    "signpost 2e2pd auto",
    "signpost 2e2p2d zmq",
    "whisper 2e2pd zmq",
    "whisper 1e2p2d auto",
    "signpost 1e1p1d auto",
    "signpost 1e1pd zmq",
    "signpost 2e2p2d redis",
    "signpost 1epd auto",
    "whisper 2e2p2d auto",
    "wide 2e2pd zmq",
    "wide 2e2pd auto",
)
pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(300)]


def _as_text(value: tuple[Fault, ...]) -> str:
    return "; ".join(map(str, value))


def _smoke(*faults: Fault) -> object:
    return pytest.param(faults, marks=pytest.mark.smoke)


# A parametrization of its own for each setup: its rounds share one cluster.
@pytest.mark.parametrize("arena_of", ["signpost 2e1p2d1pd auto"], indirect=True)
@pytest.mark.parametrize(
    "faults",
    [
        _smoke(Fault("kill", "e0", 0.7), Fault("kill", "d0", 1.1)),
        (Fault("kill", "broker", 0.8), Fault("kill", "p0", 0.9)),
        (Fault("kill", "pd0", 0.9),),
        _smoke(Fault("kill", "proxy", 1.0)),
        (Fault("flush", "broker", 0.5), Fault("drop", "d1>broker", 0.8, 1.5)),
    ],
    ids=_as_text,
)
async def test_known_with_pictures(arena_of: ChaosHarness, faults: tuple[Fault, ...]) -> None:
    done = await arena_of.endure(*faults)
    assert done.in_flight_at_fault[0] == IN_FLIGHT


@pytest.mark.parametrize("arena_of", ["whisper 2e2pd zmq"], indirect=True)
@pytest.mark.parametrize(
    "faults",
    [(Fault("stop", "pd0", 0.4, 2.5),), (Fault("reset", "<>e0,pd1", 0.4, 1.5),)],
    ids=_as_text,
)
async def test_known_with_sounds(arena_of: ChaosHarness, faults: tuple[Fault, ...]) -> None:
    done = await arena_of.endure(*faults)
    assert done.in_flight_at_fault[0] == IN_FLIGHT


@pytest.mark.parametrize("arena_of", SETUPS if ROUNDS else (), indirect=True)
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_drawn(arena_of: ChaosHarness, number: int, request: pytest.FixtureRequest) -> None:
    setup = request.node.callspec.params["arena_of"]
    rng = random.Random(f"{SEED} {setup} {number}")
    faults = draw_faults(rng, list(arena_of.cluster.instances), STOP_S)
    print(f"\nCHAOS_SEED={SEED}, {setup}, round {number}: {'; '.join(map(str, faults))}")
    done = await arena_of.endure(*faults)
    print(dict(done.endings))
    assert done.in_flight_at_fault[0] == IN_FLIGHT
