"""Workers that encode for themselves, always or while no encoder is there: the proxy hears of events in order, and
everybody is answered."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages import Encoded, InputNeeded, Role
from tests.model.simulation.cluster import Cluster

PAIR: dict[str, Role] = {"e0": "encoder", "p0": "prefill", "d0": "decode"}
SINGLE: dict[str, Role] = {"e0": "encoder", "d0": "prefill_decode"}


def test_an_input_that_is_taken_back_as_soon_as_it_is_stored_is_told_as_stored_first() -> None:
    """Else the proxy would count a failure, and after some of them give the request up."""
    cluster = Cluster({"epd0": "encode_prefill_decode"})
    try:
        cluster.ask(("x", 1))
        [(connection, _)] = cluster.lines()
        while cluster.lines():
            cluster.move(*cluster.lines()[0])
        encoder, decoder = cluster.workers["epd0"].threads
        cluster.turn(decoder)
        cluster.turn(encoder)
        decoder.submit(_take_back)
        cluster.turn(decoder)
        told = [type(message) for message in connection.to_proxy]
        assert told == [Encoded, InputNeeded]
        cluster.run_quietly()
    finally:
        cluster.close()


def _take_back(engine: Any) -> None:
    """As for an older request that needs the room."""
    intake = engine.input_receiver
    [pair] = intake._ready_inputs()
    intake._lose(*pair)


@pytest.mark.parametrize("num_steps", [0, 15, 40, 80])
@pytest.mark.parametrize(
    ("topology", "encoder_fallback"),
    [(SINGLE, True), (PAIR, True), (SINGLE | {"epd0": "encode_prefill_decode"}, False)],
    ids=["decoder with fallback", "prefill worker with fallback", "another worker that does everything"],
)
def test_everybody_is_answered_though_the_encoder_does_not_come_back(
    topology: dict[str, Role], encoder_fallback: bool, num_steps: int
) -> None:
    """The last encoder dies and stays away."""
    cluster = Cluster(topology, encoder_fallback=encoder_fallback)
    try:
        clients = [cluster.ask(("x", 1), ("y", 2)), cluster.ask(("x", 1)), cluster.ask(("z", 3), ("x", 1))]
        for number in range(num_steps):
            cluster.go_on(number)
        cluster.kill("e0")
        clients.append(cluster.ask(("w", 2)))
        cluster.run_quietly(without={"e0"})
        assert [client.error for client in clients] == [None] * 4
    finally:
        cluster.close()
