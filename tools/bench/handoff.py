"""`python -m tools.bench.handoff`: how long the output of an encoder is on its way to a decoder, hop by hop.

Between real worker processes of one host, through the HTTP API. One request after the other, so that what is measured
is the way itself: neither a queue in front of it nor a step of the decoder's engine that its commands wait for.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tools.bench.report import hop_table
from tools.bench.with_cluster import ClusterSystem
from tools.bench.workloads import make_workload

WARM_UP = 5
"""Requests that are not counted: connections are made, memory is touched for the first time."""


def handoff(
    model: Annotated[str, typer.Argument(help="Folder, hub id or bundled name; its encoder's output is what travels.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    count: Annotated[int, typer.Option(min=1, help="Requests, each with media of its own.")] = 100,
) -> None:
    """Measure every hop between an encoder and a decoder worker and print a table in markdown."""
    workload = make_workload(model)
    system = ClusterSystem(workload.info, dtype, "1e1pd")
    try:
        outcomes = [system.run([request])[0] for request in workload.requests(WARM_UP + count, seed=0)]
        hops = system.hops(outcomes[WARM_UP:])
    finally:
        system.close()
    print(f"{workload.name} ({workload.unit}), {dtype}, {count} requests one after the other\n\n{hop_table(hops)}")


if __name__ == "__main__":
    typer.run(handoff)
