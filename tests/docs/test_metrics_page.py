"""docs/reference/metrics.md lists the metrics that the code has."""

from __future__ import annotations

from tools.house.metrics_page import PAGE, page


def test_the_page_of_metrics_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.house.metrics_page"
