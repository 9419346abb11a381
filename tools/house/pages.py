"""`python -m tools.house.pages`: write the tables of docs/reference/settings.md and metrics.md, below their markers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric

from common.config import describe_settings
from launch.cli.broker import BrokerMetrics
from proxy.server.metrics import ProxyMetrics
from services.process.metric_help import HELP
from services.process.metrics import WorkerMetrics

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "reference"
MARKER: Final = "<!-- tables by `python -m tools.house.pages`; a test keeps them current -->\n"


def pages() -> dict[Path, str]:
    """Return each page with its tables as the code has them."""
    tables = {REFERENCE / "settings.md": _settings(), REFERENCE / "metrics.md": _metrics()}
    return {page: page.read_text().partition(MARKER)[0] + MARKER + "\n".join(rows) for page, rows in tables.items()}


def _settings() -> Iterator[str]:
    yield from ("", "| name | flag | environment variable | default | meaning |", "|---|---|---|---|---|")
    for setting in describe_settings():
        flag = f"`{setting.flag}`" if setting.panel else "MODEL" if setting.name == "model" else ""
        meaning = setting.meaning.replace("|", r"\|")
        yield f"| `{setting.name}` | {flag} | `{setting.variable}` | {setting.default} | {meaning} |"
    yield ""


def _metrics() -> Iterator[str]:
    proxy, worker, broker = (
        [_row(metric) for metric in metrics.registry.collect()]
        for metrics in (ProxyMetrics(), WorkerMetrics(), BrokerMetrics())
    )
    worker += [_looked_up(name, text) for name, text in HELP.items()]
    for title, rows in (("Proxy", proxy), ("Workers", worker), ("Broker", broker)):
        yield from ("", f"## {title}", "", "| metric | kind | meaning |", "|---|---|---|", *sorted(rows))
    yield ""


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"| `{name}` | {metric.type} | {metric.documentation} |"


def _looked_up(name: str, text: str) -> str:
    """The row of a number that is looked up when scraped; the help of a tally names its labels."""
    if ", by " in text:
        return f"| `triptych_{name}_total` | counter | {text} |"
    return f"| `triptych_{name}` | {'counter' if name.endswith('_total') else 'gauge'} | {text} |"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
