"""Clusters that wander: what happens next is drawn from a seed. Fast, and the same every time. And what they found."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from common.messages import Role
from tests.model.simulation.cluster import Cluster

STEPS = 150
OUTAGES = 0.01
"""How often something is lost that all share, per step."""
ABSENCES = 0.03
"""How often an encoder goes, or comes back, per step."""


def wander(
    topology: Mapping[str, Role], seed: int, *, outages: bool = False, absences: bool = False, **options: Any
) -> None:
    """One story, with preemptions, deaths and clients that leave, until nothing is left; with `outages`, the proxy dies
    and the broker is away or forgets, too; with `absences`, encoders die and come back later, or in the end. `options`
    are the cluster's. Raises where a promise is broken."""
    draw, outage, absence = random.Random(seed), random.Random(~seed), random.Random(f"{seed}")
    cluster = Cluster(topology, **options)
    try:
        for _ in range(STEPS):
            _happen(cluster, draw)
            if outages and outage.random() < OUTAGES:
                _break(cluster, outage)
            if absences and absence.random() < ABSENCES:
                _come_or_go(cluster, absence)
            cluster.check()
        cluster.run_quietly()
    finally:
        cluster.close()


def _come_or_go(cluster: Cluster, draw: random.Random) -> None:
    encoders = [name for name, role in sorted(cluster.topology.items()) if role == "encoder"]
    if not encoders:
        return
    name = draw.choice(encoders)
    if name in cluster.workers:
        cluster.kill(name)
    else:
        cluster.start(name)


def _happen(cluster: Cluster, draw: random.Random) -> None:
    what = draw.random()
    if what < 0.05 and len(cluster.clients) < 8:
        cluster.ask(*[(draw.choice("wxyz"), draw.randint(1, 3)) for _ in range(draw.randint(0, 3))])
    elif what < 0.10:
        cluster.preempt(draw.choice(sorted(cluster.workers)))
    elif what < 0.11:
        cluster.faulty = True
        cluster.pass_time(draw.choice([1.0, 5.0]))
    elif what < 0.12 and cluster.clients:
        cluster.leave(draw.choice(cluster.clients))
    elif what < 0.123:
        name = draw.choice(sorted(cluster.workers))
        cluster.kill(name)
        cluster.start(name)
    else:
        cluster.go_on(draw.randrange(64))


def _break(cluster: Cluster, draw: random.Random) -> None:
    if draw.random() < 0.4:
        cluster.kill_proxy()
    else:
        cluster.lose_broker(emptied=draw.random() < 0.7, away_s=draw.choice([0.0, 1.0, 3.0, 8.0]))


def show_a_cached_picture_and_another() -> None:
    """A conversation goes on with a second picture. The first one is in the KV cache and in the encoder cache, and both
    together have no room there."""
    cluster = Cluster({"e0": "encoder", "d0": "prefill_decode"}, cache_rows=3)
    try:
        cluster.ask(("x", 2))
        cluster.run_quietly()
        cluster.ask(("x", 2), ("z", 2))
        cluster.run_quietly()
    finally:
        cluster.close()
