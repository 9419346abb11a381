"""Times and rates of many requests in a small table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.table import Table

from launch.cli.client import ClientResult

PERCENTILES = (50, 90, 99)


def latency_table(outcomes: Sequence[ClientResult]) -> Table:
    """Return TTFT, latency and tokens/s of the successful requests, at p50, p90 and p99.

    The p99 of tokens/s is the rate that 99 % of the requests reach or exceed: a slow tail shows in every row.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    table = Table()
    table.add_column("")
    for percentile in PERCENTILES:
        table.add_column(f"p{percentile}", justify="right")
    ttfts = [outcome.ttft_s for outcome in good if outcome.ttft_s is not None]
    rates = [outcome.tokens_per_s for outcome in good if outcome.tokens_per_s is not None]
    table.add_row("TTFT", *_cells(ttfts, PERCENTILES, _seconds))
    table.add_row("latency", *_cells([outcome.latency_s for outcome in good], PERCENTILES, _seconds))
    table.add_row("tokens/s per request", *_cells(rates, [100 - p for p in PERCENTILES], lambda rate: f"{rate:.1f}"))
    return table


def summary(outcomes: Sequence[ClientResult], wall_s: float) -> str:
    """Return a line with the number of answers and the total rate."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.completion_tokens or 0 for outcome in good)
    return (
        f"{len(good)} of {len(outcomes)} requests answered in {wall_s:.2f} s · "
        f"{len(good) / wall_s:.2f} requests/s · {tokens / wall_s:.1f} tokens/s"
    )


def _cells(values: Sequence[float], percentiles: Sequence[int], show: Callable[[float], str]) -> list[str]:
    if not values:
        return ["–"] * len(percentiles)
    return [show(float(value)) for value in np.percentile(values, percentiles)]


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
