"""The reference page of settings is written from their definition."""

from __future__ import annotations

from pathlib import Path

from tools.house.settings_page import settings_page


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"
    assert page.read_text() == settings_page(), "run: python -m tools.house.settings_page > docs/reference/settings.md"
