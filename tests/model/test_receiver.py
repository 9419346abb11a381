"""Every state of small receivers: no order, loss, repetition or delay of messages breaks a promise or stops a burst."""

from __future__ import annotations

import pytest

from tests.model.depth import DEEP
from tests.model.explore import explore
from tests.model.receiver import Plan, Receiver

PLANS = {
    "two requests, room for one": Plan({"a": ["x"], "b": ["y"]}, {"x": 1, "y": 1}, 1, max_attempts=1),
    "two requests, room for one, offers withdrawn": Plan(
        {"a": ["x"], "b": ["y"]}, {"x": 1, "y": 1}, 1, max_attempts=1, faults=frozenset({"duplicate", "withdraw"})
    ),
    "two requests over the same content": Plan({"a": ["x"], "b": ["x"]}, {"x": 1}, 1, max_attempts=1),
    "two inputs of one request, room for one": Plan({"a": ["x", "y"]}, {"x": 1, "y": 1}, 1, max_attempts=1),
    "two inputs of different sizes": Plan({"a": ["x", "y"]}, {"x": 1, "y": 2}, 2, max_attempts=1),
    "cross-attention to two inputs": Plan({"a": ["x", "y"]}, {"x": 1, "y": 1}, 2, max_attempts=1, cross_attention=True),
    "three inputs of two requests, nothing repeated": Plan(
        {"a": ["x", "y"], "b": ["z"]}, {"x": 1, "y": 1, "z": 1}, 1, faults=frozenset({"preempt"}), max_attempts=1
    ),
}
DEEP_PLANS = {
    "two inputs of one request, three attempts": Plan({"a": ["x", "y"]}, {"x": 1, "y": 1}, 1, max_attempts=2),
    "two requests with two inputs, nothing repeated": Plan(
        {"a": ["x", "y"], "b": ["z", "x"]}, {"x": 1, "y": 1, "z": 1}, 1, faults=frozenset({"preempt"}), max_attempts=1
    ),
    "two requests, three attempts": Plan({"a": ["x"], "b": ["y"]}, {"x": 1, "y": 2}, 2, max_attempts=2),
    "three requests": Plan(
        {"a": ["x"], "b": ["y"], "c": ["x"]}, {"x": 1, "y": 1}, 1, max_attempts=1, faults=frozenset({"abort", "expire"})
    ),
    "two requests with two inputs": Plan(
        {"a": ["x", "y"], "b": ["z", "x"]},
        {"x": 1, "y": 1, "z": 1},
        2,
        max_attempts=1,
        faults=frozenset({"abort", "expire", "preempt"}),
    ),
}


LARGEST = ("two requests, room for one", "two requests over the same content")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow if name in LARGEST else ()) for name in PLANS),
        *(DEEP_PLANS if DEEP else ()),
    ],
)
def test_every_state_keeps_the_promises_and_drains_once_the_faults_stop(name: str) -> None:
    plan = {**PLANS, **DEEP_PLANS}[name]
    found = explore(Receiver.of(plan), Receiver.copy, Receiver.run_quietly, max_states=2_000_000 if DEEP else 20_000)
    assert found.num_transitions > found.num_states > 90
