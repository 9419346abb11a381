"""Helpers of the tests of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quiet(quiet_logs: None) -> None:
    """Thousands of clusters live and die here; what they would say about it is part of the life of real ones."""
