"""docs/reference/settings.md and metrics.md list the settings and the metrics that the code has."""

from __future__ import annotations

from tools.house.pages import pages


def test_the_tables_of_settings_and_metrics_are_current() -> None:
    for page, text in pages().items():
        assert page.read_text() == text, "run: .venv/bin/python -m tools.house.pages"
