"""A plot of a benchmark: the share of requests within a time, a panel per metric and a line per level of load."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from common.errors import invalid
from launch.bench.figures import OBJECTIVES, Run


def check_plot(file: Path) -> None:
    """Raise TriptychError("invalid_request") without matplotlib, and for an ending of no format that it writes."""
    if find_spec("matplotlib") is None:
        raise invalid("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    endings = [f".{name}" for name in Figure().canvas.get_supported_filetypes()]
    if file.suffix.lower() not in endings:
        raise invalid(f"--plot {file} should end with one of {', '.join(sorted(endings))}")


def draw(runs: Sequence[Run], title: str, file: Path) -> None:
    """Write the plot in the format of the file's ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(OBJECTIVES), sharey=True)
    for axes, metric in zip(panels, OBJECTIVES, strict=True):
        for number, run in enumerate(runs):
            values = run.values(metric)
            (axes.ecdf if values else axes.plot)(values, label=run.level, color=f"C{number}")
        axes.set(xlabel=f"{metric.replace('_', ' ')}, ms", xlim=(0, None))
        axes.grid(visible=True, alpha=0.3)
    panels[0].set(ylabel="share of requests")
    panels[0].legend(loc="lower right")
    figure.savefig(file)
