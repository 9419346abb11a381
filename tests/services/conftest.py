"""Helpers of the tests of this folder."""

from __future__ import annotations

from tests.broker.conftest import broker_url, redis, zmq_context

__all__ = ["broker_url", "redis", "zmq_context"]
