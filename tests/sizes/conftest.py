"""A broker, as the equality tests have it."""

from __future__ import annotations

from tests.equality.conftest import broker_url

__all__ = ["broker_url"]
