"""Clusters that wander by seed: faster than a search, and the same every time."""

from __future__ import annotations

import pytest

from common.messages import Role
from tests.model.depth import seeds
from tests.model.wandering import show_a_cached_picture_and_another, wander

TOPOLOGIES: dict[str, dict[str, Role]] = {
    "2e2pd": {"e0": "encoder", "e1": "encoder", "d0": "prefill_decode", "d1": "prefill_decode"},
    "1e1p1d": {"e0": "encoder", "p0": "prefill", "d0": "decode"},
    "1e2p2d": {"e0": "encoder", "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"},
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_breaks_a_promise_on_the_way(topology: str) -> None:
    for seed in seeds(few=20):
        try:
            wander(TOPOLOGIES[topology], seed, outages=True)
        except Exception as error:
            error.add_note(f"wander({TOPOLOGIES[topology]}, seed={seed}, outages=True) tells it again")
            raise


def test_an_input_that_came_before_its_place_is_known_is_there_when_it_is_read() -> None:
    """What seed 26 had found: the prefill read a later input's room after it had been given up."""
    wander(TOPOLOGIES["1e2p2d"], seed=26)


def test_a_second_picture_finds_room_beside_a_first_one_that_is_cached_twice() -> None:
    """What seed 45 had found: the first picture, needed no more, kept the room that the request was waiting for."""
    show_a_cached_picture_and_another()
