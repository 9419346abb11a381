"""`python -m tools.bench_gpu NAME…`: measures and prints a markdown table, every figure beside its limit."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from common.process import openmp

if TYPE_CHECKING:
    from tools.bench_gpu.setup import Setup
    from tools.gpu_check.figures import Figure

NAMES: Final = (
    "decode",
    "prefill",
    "cross",
    "cross_plan",
    "encoder",
    "handoff",
    "batching",
    "serving",
    "small",
)
"""Modules of this package, each with a function `measure`; what matters most comes first."""
HOST: Final = "--host"
"""Read the words of each call from standard input, as `tools.gpu_check.hosted` sends them."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}; all if none is given.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    toy: Annotated[bool, typer.Option(help="Tiny models and loads: does it run? Its figures mean nothing.")] = False,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    models: Annotated[
        Path | None, typer.Option(envvar="TRIPTYCH_GPU_MODELS", help="Folder of real checkpoints, for `small`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures, whole after each of them.")] = None,
) -> None:
    """Measure the limits of the device, then what was asked for. The exit status is 1 if something failed."""
    openmp.set_defaults(os.environ)
    import torch

    from tools.bench_gpu.attempts import attempted
    from tools.bench_gpu.limits import measure_limits
    from tools.bench_gpu.setup import Setup, checkpoints_in
    from tools.gpu_check.figures import HEADER

    unknown = set(names or ()) - set(NAMES)
    if unknown:
        raise typer.BadParameter(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    report = _Report(out)
    limits, of_the_device = measure_limits(torch.device(device), toy=toy)
    if device == "cuda":
        torch.cuda.empty_cache()  # workers that a benchmark starts find their share free
    print(HEADER, flush=True)
    for figure in of_the_device:
        report.add(figure)
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            setup = Setup(torch.device(device), limits, Path(folder), toy, repetitions, checkpoints_in(models))
            for figure in attempted(name, "all of it", partial(_measure, name, setup)):
                report.add(figure)
    raise typer.Exit(int(report.has_failed))


def _measure(name: str, setup: Setup) -> Iterator[Figure]:
    """Imported here: that a module cannot be imported is its own failure."""
    measure: Callable[[Setup], Iterator[Figure]] = pkgutil.resolve_name(f"tools.bench_gpu.{name}:measure")
    yield from measure(setup)


class _Report:
    """Tells each figure as it comes: a benchmark that is ended later keeps what it has measured."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._figures: list[Figure] = []

    def add(self, figure: Figure) -> None:
        self._figures.append(figure)
        print(figure.row(), flush=True)
        if self._path is not None:
            whole = self._path.with_name(f"{self._path.name}.part")
            whole.write_text(json.dumps({"found": self._found(), "figures": [asdict(one) for one in self._figures]}))
            whole.replace(self._path)

    @property
    def has_failed(self) -> bool:
        return any(figure.failed for figure in self._figures)

    def _found(self) -> str:
        failed: Sequence[Figure] = [figure for figure in self._figures if figure.failed]
        words = f"{len(self._figures) - len(failed)} figures"
        return f"{words}, {len(failed)} failed: {'; '.join(one.case for one in failed)}" if failed else words


def _status_of(words: Sequence[str]) -> int:
    """The exit status of a call with these words. What goes wrong in it is told as Python tells it."""
    try:
        return _app(args=list(words), standalone_mode=False) or 0
    except Exception:
        traceback.print_exc()
        return 1


_app = typer.Typer(add_completion=False)
_app.command()(main)

if __name__ == "__main__":
    if sys.argv[1:] == [HOST]:
        openmp.set_defaults(os.environ)
        from tools.bench_gpu.host import answer

        answer(_status_of)
    else:
        _app()
