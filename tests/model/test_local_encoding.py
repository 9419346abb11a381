"""A worker that encodes for itself: what its encoder and its decoder say reaches the proxy in the order of events."""

from __future__ import annotations

from typing import Any

from common.messages import Encoded, InputNeeded
from tests.model.simulation.cluster import Cluster


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
