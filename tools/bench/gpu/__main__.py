"""`python -m tools.bench.gpu NAME…`: prints a markdown table, every figure beside its limit."""

from __future__ import annotations

import os
import pkgutil
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from common.process import openmp

if TYPE_CHECKING:
    from tools.bench.gpu.figures import Figure
    from tools.bench.gpu.setup import Setup

BENCHMARKS: Final = {
    "decode": "steps:measure_decode",
    "prefill": "steps:measure_prefill",
}
"""Functions of this package by name; the most important come first."""
LOADS: Final = {
    "serving": "serving:measure",
    "gaps": "loads:measure_gaps",
    "window": "loads:measure_window",
}
"""The same, of clusters: they are measured one after the other on one cluster of each system."""
EVERYTHING: Final = (*BENCHMARKS, *LOADS)
BEGIN, END = "<!-- measured on a GPU: begin -->", "<!-- measured on a GPU: end -->"
"""The marks of a page between which `--write` writes."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(EVERYTHING)}; all by default.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    toy: Annotated[bool, typer.Option(help="Tiny models and loads: does it run? Its figures mean nothing.")] = False,
    system: Annotated[list[str] | None, typer.Option(help="Of clusters, as 1e1pd; by default all.")] = None,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    note: Annotated[list[str] | None, typer.Option(help="A sentence about this run, for the page.")] = None,
    write: Annotated[Path | None, typer.Option(help="A page to write into, between its marks.")] = None,
) -> None:
    """Measure the limits of the device, then what was asked for. The exit status is 1 if something failed."""
    openmp.set_defaults(os.environ)
    import torch

    from tools.bench import report
    from tools.bench.gpu.figures import HEADER
    from tools.bench.gpu.setup import Setup, measure_limits

    if unknown := set(names or ()).difference(EVERYTHING):
        raise typer.BadParameter(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(EVERYTHING)}")
    limits, figures = measure_limits(torch.device(device), toy=toy)
    if device == "cuda":
        torch.cuda.empty_cache()  # workers that a benchmark starts find their share free
    print(report.markdown(HEADER, [figure.cells() for figure in figures]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(torch.device(device), limits, Path(folder), toy, repetitions, tuple(system or ()))
        for figure in measure(names or EVERYTHING, setup):
            figures.append(figure)
            print(report.row(figure.cells()), flush=True)
    if write is not None:
        table = report.markdown(HEADER, [figure.cells() for figure in figures])
        report.write_into(write, report.page([table], None, note or [], datetime.now(UTC).date()), BEGIN, END)
    raise typer.Exit(int(any(figure.failed for figure in figures)))


def measure(names: Sequence[str], setup: Setup) -> Iterator[Figure]:
    """Yield the figures of benchmarks. Their modules are imported here: one that cannot be is a failure of its own."""
    from tools.bench.gpu.setup import attempted

    for name in (name for name in names if name in BENCHMARKS):
        yield from attempted(name, "all of it", _call, BENCHMARKS[name], setup)
    if loads := {name: partial(_call, LOADS[name]) for name in names if name in LOADS}:
        yield from attempted("serving", "all of it", _call, "serving:on_systems", setup, loads)


def _call(path: str, *args: Any) -> Iterator[Figure]:
    yield from pkgutil.resolve_name(f"tools.bench.gpu.{path}")(*args)


if __name__ == "__main__":
    typer.run(main)
