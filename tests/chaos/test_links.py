"""One link between two workers is cut, and stays so: both reach all others, so the work finds another way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import pytest

from common.model_info import BUNDLED
from tests.chaos.asks import picture_asks, salted
from tests.chaos.harness import ChaosHarness, arena
from tools.soak.asking import send

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
PATIENCE_S: Final = 2.0


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosHarness]:
    """Two encoders and two prefill workers, one of each to be passed over; tensors go through the cables."""
    folder, settings = tmp_path_factory.mktemp("temporary"), {"handoff_timeout_s": PATIENCE_S}
    setup = str(BUNDLED / "signpost"), "2e2p1d", picture_asks
    with arena(folder, *setup, count=6, transport="zmq", settings=settings) as ready:
        yield ready


@pytest.mark.parametrize("link", ["e0>p0", "p1>d0"])
async def test_what_cannot_be_delivered_by_one_worker_is_by_another(impatient: ChaosHarness, link: str) -> None:
    asks = [salted(ask, f"{link} {turn}") for turn in range(2) for ask in impatient.asks]
    async with impatient.client() as http, asyncio.timeout(60.0), impatient.breaker.cut(link, "drop"):
        replies = await asyncio.gather(*(send(http, ask) for ask in asks))
    wrong = [impatient.fault_of(ask, reply) for ask, reply in zip(2 * impatient.asks, replies, strict=True)]
    assert not [what for what in wrong if what]
    await impatient.wait_until_nothing_is_held(4 * PATIENCE_S)
