"""`python -m tools.bench.gpu NAME…`: prints a markdown table, every figure beside its limit."""

from __future__ import annotations

import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from common.process import openmp

if TYPE_CHECKING:
    from tools.bench.gpu.figures import Figure
    from tools.bench.gpu.setup import Setup

NAMES: Final = (
    "decode",
    "prefill",
    "cross",
    "encoder",
    "handoff",
    "serving",
    "small",
)
"""Modules of this package, each with a function `measure`; what matters most comes first."""
MODELS: Final = "TRIPTYCH_GPU_MODELS"
"""The variable that names the folder of real checkpoints."""
BEGIN, END = "<!-- measured on a GPU: begin -->", "<!-- measured on a GPU: end -->"
"""The marks of a page between which `--write` writes."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}; all if none is given.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    toy: Annotated[bool, typer.Option(help="Tiny models and loads: does it run? Its figures mean nothing.")] = False,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    models: Annotated[Path | None, typer.Option(envvar=MODELS, help="Folder of real checkpoints, for `small`.")] = None,
    note: Annotated[str, typer.Option(help="A sentence about this run, for the page.")] = "",
    write: Annotated[Path | None, typer.Option(help="A page to write into, between its marks.")] = None,
) -> None:
    """Measure the limits of the device, then what was asked for. The exit status is 1 if something failed."""
    openmp.set_defaults(os.environ)
    import torch

    from tools.bench.gpu.figures import HEADER
    from tools.bench.gpu.setup import Setup, attempted, checkpoints_in, measure_limits
    from tools.bench.report import write_into
    from tools.gpu_check.environment import in_words

    unknown = set(names or ()) - set(NAMES)
    if unknown:
        raise typer.BadParameter(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    limits, figures = measure_limits(torch.device(device), toy=toy)
    if device == "cuda":
        torch.cuda.empty_cache()  # workers that a benchmark starts find their share free
    print("\n".join([HEADER, *(figure.row() for figure in figures)]), flush=True)
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            setup = Setup(torch.device(device), limits, Path(folder), toy, repetitions, checkpoints_in(models))
            for figure in attempted(name, "all of it", partial(_measure, name, setup)):
                figures.append(figure)
                print(figure.row(), flush=True)
    if write is not None:
        head = f"Measured on {datetime.now(UTC):%Y-%m-%d}: {in_words()}. {note}".strip()
        write_into(write, "\n".join([head, "", HEADER, *(figure.row() for figure in figures)]), BEGIN, END)
    raise typer.Exit(int(any(figure.failed for figure in figures)))


def _measure(name: str, setup: Setup) -> Iterator[Figure]:
    """Imported here: that a module cannot be imported is its own failure."""
    measure: Callable[[Setup], Iterator[Figure]] = pkgutil.resolve_name(f"tools.bench.gpu.{name}:measure")
    yield from measure(setup)


if __name__ == "__main__":
    typer.run(main)
