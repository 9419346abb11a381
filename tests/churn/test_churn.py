"""Workers that come, leave and die at random under load: every request ends, and none ends wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.churn import load
from tests.churn.cell import cell

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WORKERS = 60
REQUESTS = 300
LOSSES_PER_S = 2.0
"""In each of two processes."""


async def test_every_request_ends_right_while_workers_come_and_go(tmp_path: Path) -> None:
    """`make churn-test` does the same with thousands."""
    with cell(tmp_path, processes=2) as one:
        await one.ready()
        await one.grow(WORKERS)
        questions = load.asks(30, 24)
        expected = await load.expect(one.url, questions)
        one.tell({"losses_per_s": LOSSES_PER_S})
        outcome = await load.ask(one.url, expected, questions, REQUESTS, in_flight=24)
        one.tell({"losses_per_s": 0})
        events, wrong = one.events()
    assert wrong == []
    assert outcome.counts["right"] + outcome.counts["refused"] == REQUESTS, outcome.told
    assert events["with work"] > 0, events
    answers = {tuple(reply.tokens[0]) for reply in expected.values()}
    assert len(answers) == len(questions)  # one that is mixed up with another would be seen
