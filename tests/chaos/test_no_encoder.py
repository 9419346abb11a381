"""The only encoder is lost for good: with --encoder-fallback its work is done where prompts are computed, else 503."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cluster.children import Backoff
from tests.chaos.asks import salted, sign_asks
from tests.chaos.harness import ChaosHarness, arena
from tests.eventually import eventually
from tools.soak.asking import send
from tools.soak.leak_check import gauges

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
PATIENCE_S = 1.0


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ChaosHarness]:
    """One encoder and one decoder; with or without the fallback."""
    settings = {"encoder_fallback": request.param, "handoff_timeout_s": PATIENCE_S}
    with arena(tmp_path, "signpost", "1e1pd", sign_asks, count=4, settings=settings) as ready:
        yield ready


@pytest.mark.parametrize("small", [True], indirect=True, ids=["fallback"])
async def test_with_a_fallback_pictures_are_answered_as_if_nothing_had_happened(small: ChaosHarness) -> None:
    replies = await _ask_without_encoder(small)
    assert replies == ["whole"] * len(small.asks)
    decoder = gauges(small.cluster.instances["pd0"], small.cluster.supervisor.plan.settings)
    assert decoder["encoder_fallbacks_total"] >= len(small.asks)


@pytest.mark.parametrize("small", [False], indirect=True, ids=["no fallback"])
async def test_without_one_pictures_are_refused_until_later_and_text_is_not(small: ChaosHarness) -> None:
    replies = await _ask_without_encoder(small)
    assert replies == ["refused"] * len(small.asks)
    body = {"model": "signpost", "max_tokens": 4, "messages": [{"role": "user", "content": "What do signs say?"}]}
    async with small.client() as http:
        text = await http.post("/v1/chat/completions", json=body)
        picture = await http.post("/v1/chat/completions", json=small.asks[0].body)
    assert text.status_code == 200
    assert (picture.status_code, picture.json()["error"]["code"]) == (503, "unavailable")
    assert int(picture.headers["retry-after"]) >= 1


async def _ask_without_encoder(small: ChaosHarness) -> list[str]:
    """Kill it; how questions about pictures then end, none of them with a wrong answer."""
    encoder = small.cluster.instances["e0"]
    encoder.backoff = Backoff(first_s=3600.0)  # nobody starts it again
    asks = [salted(replace(ask, stream=False), "lost") for ask in small.asks]
    assert encoder.pid is not None
    os.kill(encoder.pid, signal.SIGKILL)
    await eventually(lambda: encoder.state == "restarting", 20.0)
    async with small.client() as http:
        replies = await asyncio.gather(*(send(http, ask) for ask in asks))
    wrong = [small.fault_of(ask, reply, ("whole", "refused")) for ask, reply in zip(asks, replies, strict=True)]
    assert not [what for what in wrong if what]
    return [reply.ending for reply in replies]
