"""`python -m launch.gpu.bench NAME…`: measures and prints a markdown table, every figure beside its limit."""

from __future__ import annotations

import json
import os
import pkgutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from common import openmp

NAMES: Final = ("decode", "prefill", "cross", "cross_plan", "encoder", "handoff", "serving", "batching")
"""Modules of this package, each with a function `measure`."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}; all if none is given.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    toy: Annotated[bool, typer.Option(help="Tiny models and loads: does it run? Its figures mean nothing.")] = False,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Measure the limits of the device, then what was asked for."""
    openmp.set_defaults(os.environ)
    import torch

    from launch.gpu.bench.limits import measure_limits
    from launch.gpu.bench.setup import Setup
    from launch.gpu.figures import HEADER, Figure

    unknown = set(names or ()) - set(NAMES)
    if unknown:
        raise typer.BadParameter(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    limits, figures = measure_limits(torch.device(device), toy=toy)
    print("\n".join([HEADER, *(figure.row() for figure in figures)]), flush=True)
    for name in names or NAMES:
        measure: Callable[[Setup], list[Figure]] = pkgutil.resolve_name(f"launch.gpu.bench.{name}:measure")
        with tempfile.TemporaryDirectory() as folder:
            setup = Setup(torch.device(device), limits, Path(folder), toy, repetitions)
            measured = measure(setup)
        print("\n".join(figure.row() for figure in measured), flush=True)
        figures += measured
    if out is not None:
        found = f"{len(figures)} figures"
        out.write_text(json.dumps({"found": found, "figures": [asdict(figure) for figure in figures]}))


if __name__ == "__main__":
    typer.run(main)
