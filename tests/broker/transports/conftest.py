from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from broker.transports.shm import sender as shm_transport
from tests.broker.transports.transport_kit import Kit, kit_of


@pytest.fixture
async def kit(redis: Redis, broker_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    """Ends over shared memory, with an arena of 4 MiB; tests of other transports have a kit of their own."""
    monkeypatch.setattr(shm_transport, "ARENA_BYTES", 4 * 2**20)
    async with kit_of("shm", redis, broker_url) as kit:
        yield kit
