"""An encoder that needs longer than a step of a handoff may last, for one item or for a line of them: nothing is wrong
with it, so every item ends in an answer, and nothing is made twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from engine.core.encoder_engine import EncoderResult
from services.encode.encode_stage import KEEP_S
from tests.model.simulation.cluster import HANDOFF_TIMEOUT_S, Client, Cluster
from tests.model.simulation.symbols import SymbolicEncoder

LONG_S = 3.5 * HANDOFF_TIMEOUT_S
SHORT_S = 0.7 * HANDOFF_TIMEOUT_S
TWO_ENCODERS = {"e0": "encoder", "e1": "encoder", "d0": "prefill_decode"}


class SlowEncoder(SymbolicEncoder):
    """Computes one item after the other, each for `item_s`; what is cancelled meanwhile is computed in vain."""

    item_s = SHORT_S
    begun: list[Any]
    """Of all of them, by key."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._current: Any = None
        self._result: list[EncoderResult] = []
        self._done_s = 0.0

    def cancel(self, key: Any) -> None:
        super().cancel(key)
        if key == self._current:
            self._result = []

    def has_work(self) -> bool:
        return super().has_work() if self._current is None else time.monotonic() >= self._done_s

    def step(self) -> list[EncoderResult]:
        if self._current is not None and time.monotonic() < self._done_s:
            return []
        finished, self._result, self._current = self._result, [], None
        if super().has_work():
            self._result = super().step()
            self._current = self._result[0].key
            self._done_s = time.monotonic() + self.item_s
            self.begun.append(self._current)
        return finished


@contextmanager
def slow_cluster(item_s: float, topology: dict[str, Any] | None = None, **engine: Any) -> Iterator[Cluster]:
    with (
        patch("tests.model.simulation.workers.SymbolicEncoder", SlowEncoder),
        patch.object(SlowEncoder, "item_s", item_s),
        patch.object(SlowEncoder, "begun", [], create=True),
    ):
        cluster = Cluster(topology or {"e0": "encoder", "d0": "prefill_decode"}, **engine)
        try:
            yield cluster
        finally:
            cluster.close()


def go_on(cluster: Cluster, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Everything happens as soon as it can, for so long or until then."""
    end_s = cluster.loop.now_s + seconds
    while cluster.loop.now_s < end_s and not until():
        cluster._drain()
        cluster.pass_time(0.1)


@pytest.mark.parametrize("cache_rows", [4, 100], ids=["room for four", "room for all"])
def test_a_burst_that_takes_many_times_a_step_of_a_handoff_is_answered_and_nothing_is_made_twice(
    cache_rows: int,
) -> None:
    with slow_cluster(SHORT_S, cache_rows=cache_rows) as cluster:
        clients = [cluster.ask((f"picture {number}", 1)) for number in range(30)]
        cluster.run_quietly()
        assert [client.error for client in clients] == [None] * 30
        assert 30 * SHORT_S > 10 * 2 * HANDOFF_TIMEOUT_S
        assert len(SlowEncoder.begun) == 30


@pytest.mark.parametrize("way", [0.4, 0.75])
def test_a_burst_is_answered_though_what_is_asked_takes_most_of_a_step_to_arrive(way: float) -> None:
    with slow_cluster(SHORT_S) as cluster:
        cluster.way_s = way * HANDOFF_TIMEOUT_S
        clients = [cluster.ask((f"picture {number}", 1)) for number in range(10)]
        cluster.run_quietly()
        assert [client.error for client in clients] == [None] * 10


def test_an_item_that_takes_longer_than_a_step_of_a_handoff_is_computed_once() -> None:
    with slow_cluster(LONG_S) as cluster:
        clients = [cluster.ask(("x", 1)), cluster.ask(("x", 1), ("y", 2))]
        cluster.run_quietly()
        assert [client.error for client in clients] == [None, None]
        assert len(SlowEncoder.begun) == 2


def test_a_request_that_is_gone_is_not_computed_however_long_it_has_waited() -> None:
    with slow_cluster(LONG_S) as cluster:
        clients = [cluster.ask((name, 1)) for name in "xyz"]
        go_on(cluster, 1.5 * LONG_S)
        assert len(SlowEncoder.begun) == 2
        cluster.leave(clients[2])
        go_on(cluster, 1.0)
        assert cluster.workers["e0"]._context.metrics.gauges["encoder_items_open"]() == 1
        cluster.run_quietly()
        assert [client.error for client in clients[:2]] == [None, None]
        assert len(SlowEncoder.begun) == 2


def test_what_a_silent_proxy_has_left_is_dropped_soon() -> None:
    """No word of it has come: neither another attempt nor an abort."""
    with slow_cluster(LONG_S) as cluster:
        cluster.ask(("x", 1))
        go_on(cluster, 1.0)
        stage = cluster.workers["e0"].role.stage
        with patch("proxy.dispatch.encode_dispatcher.EncodeDispatcher.on_encoded", _ignore):
            go_on(cluster, HANDOFF_TIMEOUT_S + KEEP_S / 2 - 1.0)
            assert (len(stage._attempts), len(stage._jobs)) == (0, 1)
            go_on(cluster, KEEP_S / 2)
            assert not stage._jobs
        cluster.faulty = True
        cluster.run_quietly()


def _ignore(*args: object) -> None: ...


def test_an_encoder_that_dies_amid_a_long_computation_is_replaced_at_once() -> None:
    with slow_cluster(LONG_S, TWO_ENCODERS) as cluster:
        client = cluster.ask(("x", 1))
        go_on(cluster, 0.9 * LONG_S)
        assert len(SlowEncoder.begun) == 1
        cluster.kill(_busy(cluster))
        go_on(cluster, 1.0)
        assert len(SlowEncoder.begun) == 2
        _answered(cluster, client)


def test_an_encoder_that_falls_silent_amid_a_long_computation_is_given_up_as_soon_as_ever() -> None:
    with slow_cluster(LONG_S, TWO_ENCODERS) as cluster:
        client = cluster.ask(("x", 1))
        go_on(cluster, 1.5 * HANDOFF_TIMEOUT_S)
        stage = cluster.workers[_busy(cluster)].role.stage
        for task in stage._attempts.values():
            task.cancel()
        silent_s = cluster.loop.now_s
        go_on(cluster, 2 * HANDOFF_TIMEOUT_S, lambda: len(SlowEncoder.begun) == 2)
        assert cluster.loop.now_s - silent_s < 2 * HANDOFF_TIMEOUT_S
        _answered(cluster, client)


def test_items_leave_an_encoder_that_has_a_long_line_for_one_that_has_none() -> None:
    with slow_cluster(SHORT_S, TWO_ENCODERS, cache_rows=100) as cluster:
        cluster.kill("e1")
        clients = [cluster.ask((f"picture {number}", 1)) for number in range(30)]
        go_on(cluster, 1.0)
        cluster.start("e1")
        began_s = cluster.loop.now_s
        go_on(cluster, 30 * SHORT_S, lambda: all(client.ended for client in clients))
        assert [client.error for client in clients] == [None] * 30
        assert cluster.loop.now_s - began_s < 24 * SHORT_S


def _busy(cluster: Cluster) -> str:
    """The encoder that computes."""
    [name] = [name for name in ("e0", "e1") if cluster.workers[name].threads[0].engine._current is not None]
    return name


def _answered(cluster: Cluster, client: Client) -> None:
    go_on(cluster, 2 * LONG_S, lambda: client.ended)
    assert (client.ended, client.error) == (True, None)
