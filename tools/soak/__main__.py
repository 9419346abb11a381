"""`python -m tools.soak`, or `make soak MINUTES=60`: a cluster under mixed load for a long time, and a verdict."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Annotated

import typer

from common.errors import TriptychError
from common.process import openmp


def soak(
    minutes: Annotated[float, typer.Option(min=0.5)] = 60.0,
    model: Annotated[str, typer.Option(help="Folder, hub id or bundled name; one that takes pictures.")] = "signpost",
    topology: Annotated[str, typer.Option(help="The first instance of each role is spared by faults.")] = "2e2p2d",
    audio_model: Annotated[str | None, typer.Option(help="One that transcribes: runs beside the other.")] = None,
    audio_topology: Annotated[str, typer.Option(help="Of the cluster that transcribes.")] = "1e2pd",
    text_model: Annotated[str, typer.Option(help="One that takes the text of numbers: beside the other.")] = "numerals",
    in_flight: Annotated[int, typer.Option(min=4, help="Requests at once; a quarter text, a quarter audio.")] = 16,
    fault_every_s: Annotated[float, typer.Option(help="Mean time between faults; 0 for none.")] = 90.0,
    seed: Annotated[int | None, typer.Option(help="Of requests and faults; drawn and printed if not given.")] = None,
    write: Annotated[Path | None, typer.Option(help="A file for the page.")] = None,
) -> None:
    """Ask about pictures, text and sounds, leave some answers, kill workers, and look whether memory stays flat.

    Ends with status 1 where an answer was wrong or missing, something was still held, a process ended that nothing had
    hit, or the memory of a supervisor or a service rose by more than 2 % over the last two thirds. The load runs in
    processes of its own: their memory is shown and not judged.
    """
    openmp.set_defaults(os.environ)
    from launch.cluster.children import adopt_orphans
    from tools.soak.report import Part, Plan, as_markdown
    from tools.soak.run import run_soak

    adopt_orphans()
    chosen = seed if seed is not None else random.SystemRandom().randrange(10**6)
    quarter = in_flight // 4
    parts = [Part("text", text_model, "1e2pd", quarter)]
    parts += [Part("audio", audio_model, audio_topology, quarter)] if audio_model else []
    parts.insert(0, Part("pictures", model, topology, in_flight - quarter * len(parts)))
    findings = run_soak(Plan(minutes, tuple(parts), fault_every_s, chosen))
    page = as_markdown(findings)
    print(page)
    if write is not None:
        write.write_text(page)
    if findings.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(soak)
    except TriptychError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
