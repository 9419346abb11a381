"""Kills, stops and cuts at drawn moments. CHAOS_SEED replays a run; CHAOS_ROUNDS makes it long (`make chaos`)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.chaos.arena import IN_FLIGHT, Arena, arena
from tests.chaos.asks import picture_asks
from tests.chaos.faults import Fault, draw_faults

SEED = int(os.environ.get("CHAOS_SEED", "2"))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
STOP_S = float(os.environ.get("CHAOS_STOP_S", "3"))
pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def two_of_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("two"), "signpost", "2e2pd", picture_asks) as ready:
        yield ready


@pytest.mark.parametrize(
    "faults",
    [
        (Fault("kill", "e0", 0.7),),
        (Fault("kill", "pd0", 1.1),),
        (Fault("stop", "e1", 0.4, STOP_S), Fault("kill", "pd1", 0.9)),
        (Fault("kill", "broker", 0.8),),
        (Fault("kill", "proxy", 1.5),),
    ],
    ids=lambda faults: "; ".join(map(str, faults)),
)
async def test_two_of_each(two_of_each: Arena, faults: tuple[Fault, ...]) -> None:
    done = await two_of_each.endure(*faults)
    print(done.endings, done.in_flight_at_fault)
    assert done.in_flight_at_fault == IN_FLIGHT


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_drawn(two_of_each: Arena, number: int) -> None:
    rng = random.Random(f"{SEED} {number}")
    faults = draw_faults(rng, list(two_of_each.cluster.instances), STOP_S)
    print(f"CHAOS_SEED={SEED}, round {number}: {'; '.join(map(str, faults))}")
    done = await two_of_each.endure(*faults)
    print(done.endings, done.in_flight_at_fault)
