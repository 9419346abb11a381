"""docs/design/handoff.md names the states and transitions of the code, no more and no fewer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from broker.handoff import sender
from common.messages import REPEAT_S, Role
from engine.handoff import kv_receiver
from engine.state.request import InputState, RequestInput
from tests.model.explore import explore
from tests.model.receiver import Plan, Receiver
from tests.model.sender import INPUT, Sender
from tests.model.simulation.cluster import HANDOFF_TIMEOUT_S, Cluster
from tests.model.simulation.wandering import show_a_cached_picture_and_another, wander
from tests.model.test_receiver import PLANS
from tests.model.transitions import Transition, watched

PAGE = Path(__file__).parents[2] / "docs" / "design" / "handoff.md"
SECTIONS: dict[str, tuple[type, set[str]]] = {
    "The sender's states": (sender.Handoff, {state.upper() for state in get_args(sender.State)}),
    "The receiver's states of an input": (RequestInput, {state.name for state in InputState}),
    "The receiver's states of keys and values": (
        kv_receiver.KvHandoff,
        {state.name for state in kv_receiver.KvHandoffState},
    ),
}
TOPOLOGIES: list[dict[str, Role]] = [
    {"e0": "encoder", "d0": "prefill_decode"},
    {"e0": "encoder", "p0": "prefill", "d0": "decode"},
]
SEEDS = range(25)
TIGHT = Plan({"a": ["x", "y"]}, {"x": 1, "y": 1}, 1, max_attempts=1)


def _section(title: str) -> str:
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _transitions(title: str) -> list[Transition]:
    return re.findall(r"^\| `(\w+)` → `(\w+)` \|", _section(title), re.MULTILINE)


@pytest.fixture(scope="module")
def observed() -> Iterator[dict[str, set[Transition]]]:
    """What the machines go through: alone in all their states, and in clusters that wander."""
    with watched(sender.Handoff) as sending, watched(RequestInput) as inputs, watched(kv_receiver.KvHandoff) as kv:
        explore(Sender(INPUT, 1), Sender.copy, lambda world: None, max_states=20_000)
        for plan in (TIGHT, PLANS["two inputs of different sizes"]):
            explore(Receiver.of(plan), Receiver.copy, lambda world: None, max_states=20_000)
        for seed in SEEDS:
            for topology in TOPOLOGIES:
                wander(topology, seed)
        _replace_what_is_granted()
        _let_a_reservation_expire()
        show_a_cached_picture_and_another()
        yield dict(zip(SECTIONS, (sending, inputs, kv), strict=True))


def _replace_what_is_granted() -> None:
    world = Receiver.of(TIGHT)
    for action in (("arrive", "a"), ("offer", "a", "0", "0"), ("offer", "a", "0", "1")):
        world.apply(action)


def _let_a_reservation_expire() -> None:
    cluster = Cluster(TOPOLOGIES[1])
    try:
        cluster.ask(("x", 2))
        cluster.faulty = True
        for _ in range(200):
            loose = cluster.network.loose
            loose[:] = [letter for letter in loose if letter.channel is not None or letter.target != "d0"]
            cluster.go_on(0)
        cluster.pass_time(HANDOFF_TIMEOUT_S + 1.0)
        cluster.run_quietly()
    finally:
        cluster.close()


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_names_the_states_of_the_code(title: str) -> None:
    named = {state for pair in _transitions(title) for state in pair}
    assert named == SECTIONS[title][1]


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_has_the_transitions_of_the_code(title: str, observed: dict[str, set[Transition]]) -> None:
    listed = _transitions(title)
    assert len(listed) == len(set(listed))
    assert set(listed) == observed[title]


def test_the_page_names_every_message_of_the_handoff_and_every_test_it_refers_to() -> None:
    text = PAGE.read_text()
    for name in ("Offer", "KvOffer", "Withdraw", "Grant", "TensorHeader", "Receipt"):
        assert f"`{name}`" in text
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (PAGE.parents[2] / path).exists(), path


def test_the_page_says_how_often_a_tensor_is_sent() -> None:
    number = {3: "three", 4: "four", 5: "five"}[sender.MAX_SENDS]
    assert set(re.findall(r"\b(\w+) sends in all", PAGE.read_text())) == {number}
    waits_s = [int(REPEAT_S * 2**number) for number in range(sender.MAX_SENDS)]
    assert f"{waits_s[0]} s after it left, then {', '.join(map(str, waits_s[1:]))} s" in PAGE.read_text()
