"""Whole clusters in which anything happens in any order: hypothesis looks for a story that breaks a promise.

A failing one is printed as the shortest story found, step by step.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from common.messages import Role, decode_to_worker
from tests.model.depth import DEEP
from tests.model.simulation.cluster import HANDOFF_TIMEOUT_S, Cluster
from tests.model.simulation.network import Letter

SETTINGS = settings(
    max_examples=1000 if DEEP else 12,
    stateful_step_count=80 if DEEP else 40,
    derandomize=not DEEP,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
FEW = settings(SETTINGS, max_examples=1000 if DEEP else 3)
"""For variants of what is told at length."""
NUMBERS = st.integers(0, 11)
PICTURES = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 3)), max_size=3)
MAX_CLIENTS = 5


class ClusterStory(RuleBasedStateMachine):
    """What may happen to one encoder and one decoder."""

    topology: ClassVar[dict[str, Role]] = {"e0": "encoder", "d0": "prefill_decode"}
    encoder_fallback: ClassVar[bool] = False

    @initialize()
    def begin(self) -> None:
        self.cluster = Cluster(self.topology, encoder_fallback=self.encoder_fallback)
        self.delay_s = 0.0

    @precondition(lambda self: len(self.cluster.clients) < MAX_CLIENTS)
    @rule(pictures=PICTURES, num_tokens=st.integers(1, 3))
    def a_client_asks(self, pictures: list[tuple[str, int]], num_tokens: int) -> None:
        self.cluster.ask(*pictures, num_tokens=num_tokens)

    @precondition(lambda self: any(not client.ended for client in self.cluster.clients))
    @rule(number=NUMBERS)
    def a_client_leaves(self, number: int) -> None:
        clients = [client for client in self.cluster.clients if not client.ended]
        client = clients[number % len(clients)]
        note(f"client of {client.job.request_id}")
        self.cluster.leave(client)

    @precondition(lambda self: self.cluster.network.loose)
    @rule(number=NUMBERS, keep=st.booleans())
    def a_message_arrives(self, number: int, keep: bool) -> None:
        letter = self._letter(number)
        self.cluster.arrive(letter, keep=keep)

    @precondition(lambda self: self.cluster.network.loose)
    @rule(number=NUMBERS, damaged=st.booleans())
    def a_message_is_lost(self, number: int, damaged: bool) -> None:
        letter = self._letter(number)
        self.cluster.faulty = True
        if damaged and letter.channel is None:
            self.cluster.network.damage(letter)
        else:
            self.cluster.network.loose.remove(letter)

    @precondition(lambda self: self.cluster.lines())
    @rule(number=NUMBERS)
    def a_line_moves(self, number: int) -> None:
        lines = self.cluster.lines()
        self.cluster.move(*lines[number % len(lines)])
        self.cluster.check()

    @precondition(lambda self: self.cluster.requests_under_way())
    @rule(number=NUMBERS)
    def a_request_is_lost(self, number: int) -> None:
        """Without a word, though its connection goes on."""
        found = self.cluster.requests_under_way()
        connection, sent = found[number % len(found)]
        note(f"{decode_to_worker(sent[1])} to {connection.worker[0]}")
        self.cluster.faulty = True
        connection.to_worker.remove(sent)

    @precondition(lambda self: self.cluster.threads_due())
    @rule(number=NUMBERS)
    def an_engine_makes_a_turn(self, number: int) -> None:
        due = self.cluster.threads_due()
        name, thread = due[number % len(due)]
        note(f"engine of {name}")
        self.cluster.turn(thread)
        self.cluster.check()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=20))
    def things_go_on(self, numbers: list[int]) -> None:
        """Several steps without a fault, in any order."""
        for number in numbers:
            self.cluster.go_on(number)
        self.cluster.check()

    @rule(seconds=st.sampled_from([0.1, 1.0, HANDOFF_TIMEOUT_S + 0.1, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.delay_s += seconds
        self.cluster.faulty = self.cluster.faulty or self.delay_s > HANDOFF_TIMEOUT_S / 2
        self.cluster.pass_time(seconds)

    @precondition(lambda self: self.cluster.workers)
    @rule(number=NUMBERS)
    def a_worker_is_killed(self, number: int) -> None:
        names = sorted(self.cluster.workers)
        name = names[number % len(names)]
        note(f"kill {name}")
        self.cluster.kill(name)

    @precondition(lambda self: len(self.cluster.workers) < len(self.cluster.topology))
    @rule()
    def a_worker_is_started_again(self) -> None:
        name = min(self.cluster.topology.keys() - self.cluster.workers.keys())
        note(f"start {name}")
        self.cluster.start(name)

    @rule()
    def the_proxy_is_killed(self) -> None:
        self.cluster.kill_proxy()

    @rule(emptied=st.booleans(), away_s=st.sampled_from([0.0, 1.0, HANDOFF_TIMEOUT_S + 0.1]), silent=st.booleans())
    def the_broker_fails(self, emptied: bool, away_s: float, silent: bool) -> None:
        self.cluster.lose_broker(emptied=emptied, away_s=away_s, silent=silent)

    @rule(number=NUMBERS)
    def a_request_is_preempted(self, number: int) -> None:
        decoders = [name for name, one in sorted(self.cluster.workers.items()) if one.engine is not None]
        if decoders:
            self.cluster.preempt(decoders[number % len(decoders)])
            self.cluster.check()

    def _letter(self, number: int) -> Letter:
        letters = self.cluster.network.loose
        letter = letters[number % len(letters)]
        note(letter.describe())
        return letter

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            try:
                self.cluster.run_quietly()
            finally:
                self.cluster.close()


class TwoEncodersTwoDecoders(ClusterStory):
    topology: ClassVar[dict[str, Role]] = {
        "e0": "encoder",
        "e1": "encoder",
        "d0": "prefill_decode",
        "d1": "prefill_decode",
    }


class PrefillApart(ClusterStory):
    topology: ClassVar[dict[str, Role]] = {"e0": "encoder", "p0": "prefill", "d0": "decode"}


class TwoPairs(ClusterStory):
    topology: ClassVar[dict[str, Role]] = {
        "e0": "encoder",
        "p0": "prefill",
        "p1": "prefill",
        "d0": "decode",
        "d1": "decode",
    }


class AllInOne(ClusterStory):
    """One that encodes for itself."""

    topology: ClassVar[dict[str, Role]] = {"epd0": "encode_prefill_decode"}


class AllInOneBesideAPair(ClusterStory):
    """One that encodes for itself, but gets what the encoder makes while there is one."""

    topology: ClassVar[dict[str, Role]] = {"e0": "encoder", "d0": "prefill_decode", "epd0": "encode_prefill_decode"}


class DecoderThatMayEncode(ClusterStory):
    encoder_fallback: ClassVar[bool] = True


class PrefillThatMayEncode(PrefillApart):
    encoder_fallback: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("story", "length"),
    [
        pytest.param(ClusterStory, SETTINGS, id="one encoder and one decoder"),
        pytest.param(TwoEncodersTwoDecoders, SETTINGS, id="two of each"),
        pytest.param(PrefillApart, SETTINGS, id="prefill and decode apart"),
        pytest.param(TwoPairs, SETTINGS, id="two pairs"),
        pytest.param(AllInOne, FEW, id="one that does everything"),
        pytest.param(AllInOneBesideAPair, FEW, id="one that does everything beside a pair"),
        pytest.param(DecoderThatMayEncode, FEW, id="a decoder that may encode"),
        pytest.param(PrefillThatMayEncode, FEW, id="a prefill worker that may encode"),
    ],
)
def test_a_cluster_keeps_its_promises_whatever_happens(story: type[ClusterStory], length: settings) -> None:
    run_state_machine_as_test(story, settings=length)
