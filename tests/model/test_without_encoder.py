"""The last encoder dies and stays away: where somebody else can encode, everybody is answered all the same."""

from __future__ import annotations

import pytest

from common.messages import Role
from tests.model.simulation.cluster import Cluster

PAIR: dict[str, Role] = {"e0": "encoder", "p0": "prefill", "d0": "decode"}
SINGLE: dict[str, Role] = {"e0": "encoder", "d0": "prefill_decode"}


@pytest.mark.parametrize("num_steps", [0, 15, 40, 80])
@pytest.mark.parametrize(
    ("topology", "encoder_fallback"),
    [(SINGLE, True), (PAIR, True), (SINGLE | {"epd0": "encode_prefill_decode"}, False)],
    ids=["decoder with fallback", "prefill worker with fallback", "another worker that does everything"],
)
def test_everybody_is_answered_though_the_encoder_does_not_come_back(
    topology: dict[str, Role], encoder_fallback: bool, num_steps: int
) -> None:
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
