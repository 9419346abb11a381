"""What was measured is told at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Tell = Callable[[str], None]
_TOLD: list[str] = []


@pytest.fixture
def tell() -> Tell:
    """Note a line for the end of the run."""
    return _TOLD.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _TOLD:
        terminalreporter.write_line(line)
