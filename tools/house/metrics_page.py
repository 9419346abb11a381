"""`python -m tools.house.metrics_page`: write docs/reference/metrics.md from the metrics that the code has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric

from launch.cli.broker import BrokerMetrics
from proxy.server.metrics import ProxyMetrics
from services.process.metric_help import HELP
from services.process.metrics import WorkerMetrics

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
_INTRODUCTION: Final = """\
# Metrics

Scrape `GET /metrics` of every process, in Prometheus' text format; of the broker, if `triptych broker` runs the server.
Histograms have `_bucket`, `_sum` and `_count` behind their names. Watch these first:

| metric | shows |
|---|---|
| `triptych_proxy_expected_wait_seconds` | the wait of a new request; beyond `max_queue_s` requests get 429 |
| `triptych_proxy_time_to_first_token_seconds`, `…_per_output_token_seconds` | latencies felt by users |
| `triptych_proxy_retries_total` by `reason` | dead or silent workers |
| `triptych_kv_cache_bytes` beside the blocks in use, `triptych_preemptions_total` | too small a KV cache |
| `triptych_integrity_failures`, `triptych_preprocess_crashes_total` | defects: 0 in a healthy cluster |

Written by `python -m tools.house.metrics_page`; a test keeps it current.
"""


def page() -> str:
    """The whole page as markdown."""
    proxy = [_row(metric) for metric in ProxyMetrics().registry.collect()]
    worker = [_row(metric) for metric in WorkerMetrics().registry.collect()]
    worker += [_looked_up(name, text) for name, text in HELP.items()]
    broker = [_row(metric) for metric in BrokerMetrics().registry.collect()]
    tables = (("Proxy", proxy), ("Workers", worker), ("Broker", broker))
    return "\n".join([_INTRODUCTION, *(line for title, rows in tables for line in [*_table(title, rows), ""])])


def _table(title: str, rows: list[str]) -> list[str]:
    return [f"## {title}", "", "| metric | kind | meaning |", "|---|---|---|", *sorted(rows)]


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"| `{name}` | {metric.type} | {metric.documentation} |"


def _looked_up(name: str, text: str) -> str:
    """The row of a number that is looked up when scraped; tallies say in their help by what they are divided."""
    if ", by " in text:
        return f"| `triptych_{name}_total` | counter | {text} |"
    return f"| `triptych_{name}` | {'counter' if name.endswith('_total') else 'gauge'} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page())
