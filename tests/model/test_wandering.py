"""Clusters that wander by seed: faster than a search, and the same every time."""

from __future__ import annotations

import pytest

from common.messages import Role
from tests.model.depth import seeds
from tests.model.simulation.wandering import show_a_cached_picture_and_another, wander

TOPOLOGIES: dict[str, dict[str, Role]] = {
    "2e2pd": {"e0": "encoder", "e1": "encoder", "d0": "prefill_decode", "d1": "prefill_decode"},
    "1e1p1d": {"e0": "encoder", "p0": "prefill", "d0": "decode"},
    "1e2p2d": {"e0": "encoder", "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"},
}
ENCODE_THEMSELVES: dict[str, dict[str, Role]] = {
    "1epd": {"epd0": "encode_prefill_decode"},
    "2epd": {"epd0": "encode_prefill_decode", "epd1": "encode_prefill_decode"},
    "1e1pd1epd": {"e0": "encoder", "d0": "prefill_decode", "epd0": "encode_prefill_decode"},
}
WITH_FALLBACK: dict[str, dict[str, Role]] = {
    "1e1pd": {"e0": "encoder", "d0": "prefill_decode"},
    "1e2pd": {"e0": "encoder", "d0": "prefill_decode", "d1": "prefill_decode"},
    "1e1p1d": TOPOLOGIES["1e1p1d"],
    "1e2p2d": TOPOLOGIES["1e2p2d"],
    "1e1p1d1epd": TOPOLOGIES["1e1p1d"] | {"epd0": "encode_prefill_decode"},
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_breaks_a_promise_on_the_way(topology: str) -> None:
    _wander_from_each(seeds(few=20), TOPOLOGIES[topology])


@pytest.mark.parametrize("topology", ENCODE_THEMSELVES)
def test_nothing_breaks_a_promise_where_a_decoder_encodes_for_itself(topology: str) -> None:
    _wander_from_each(seeds(few=2), ENCODE_THEMSELVES[topology], absences=True)


@pytest.mark.parametrize("topology", WITH_FALLBACK)
def test_nothing_breaks_a_promise_where_a_decoder_encodes_while_no_encoder_is_there(topology: str) -> None:
    _wander_from_each(seeds(few=2), WITH_FALLBACK[topology], absences=True, encoder_fallback=True)


def _wander_from_each(numbers: range, topology: dict[str, Role], **options: bool) -> None:
    for seed in numbers:
        try:
            wander(topology, seed, outages=True, **options)
        except Exception as error:
            error.add_note(f"wander({topology}, seed={seed}, outages=True, **{options}) tells it again")
            raise


def test_an_input_that_came_before_its_place_is_known_is_there_when_it_is_read() -> None:
    """What seed 26 had found: the prefill read a later input's room after it had been given up."""
    wander(TOPOLOGIES["1e2p2d"], seed=26)


def test_a_second_picture_finds_room_beside_a_first_one_that_is_cached_twice() -> None:
    """What seed 45 had found: the first picture, needed no more, kept the room that the request was waiting for."""
    show_a_cached_picture_and_another()
