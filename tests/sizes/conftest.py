"""A broker, as the equality tests have it, and memory for the models."""

from __future__ import annotations

import pytest

from common.process.host_memory import available_memory
from tests.equality.conftest import broker_url
from tests.sizes.known import DEVICE, TOY

NEEDED_BYTES = 18 * 2**30
"""Of transformers with 3 billion float32 weights, and activations; in bfloat16 a cluster takes less."""

__all__ = ["broker_url"]


@pytest.fixture(scope="session", autouse=True)
def _memory() -> None:
    """Skip where the machine has too little, before it has none left."""
    if DEVICE == "cpu" and not TOY and available_memory() < NEEDED_BYTES:
        pytest.skip(f"real sizes take {NEEDED_BYTES >> 30} GiB, {available_memory() >> 30} are free here")
