"""The broker behind sentinels: its leader is killed under load, and another leads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.config import EngineConfig, Settings
from launch.cluster.local_cluster import LocalCluster
from tests.broker.sentinels import Group, sentinel_group
from tests.chaos.asks import picture_asks
from tests.chaos.harness import ANSWER_TIMEOUT_S, START_TIMEOUT_S
from tests.chaos.load import keep_asking
from tests.eventually import eventually
from tools.soak.asking import Reply, send
from tools.soak.asks import Ask

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
IN_FLIGHT = 8


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[LocalCluster, Group]]:
    """A cluster, and its broker's servers and sentinels. Tensors travel through shared memory."""
    with sentinel_group(tmp_path) as group:
        settings = Settings(
            model="signpost",
            port=0,
            broker=group.url,
            cluster="failover",
            max_queue_s=600.0,
            engine=EngineConfig(num_threads=1),
        )
        with LocalCluster(settings, "2e1p1d", start_timeout_s=START_TIMEOUT_S) as cluster:
            yield cluster, group


async def test_a_failover_under_load_loses_no_stream_and_changes_no_answer(
    guarded: tuple[LocalCluster, Group],
) -> None:
    cluster, group = guarded
    asks = picture_asks("signpost", 2 * IN_FLIGHT)
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=5.0)
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=timeout, trust_env=False) as http:
        replies = await asyncio.gather(*(send(http, ask) for ask in asks))
        assert [reply.ending for reply in replies] == ["whole"] * len(asks)
        expected = {ask.name: reply for ask, reply in zip(asks, replies, strict=True)}
        got, over = list[tuple[Ask, Reply]](), asyncio.Event()
        asking = asyncio.ensure_future(keep_asking(http, asks, IN_FLIGHT, over, got))
        await eventually(lambda: len(got) >= IN_FLIGHT, 60.0)
        killed = await asyncio.to_thread(group.kill_leader)
        await eventually(lambda: group.leader not in (0, killed), 60.0)
        num_before = len(got)
        await eventually(lambda: len(got) >= num_before + 2 * IN_FLIGHT, 100.0)
        over.set()
        await asking
    wrong = [f"{ask.name}: {reply.ending} {reply.error}" for ask, reply in got if not reply.begins(expected[ask.name])]
    assert not wrong
    endings = [reply.ending for _, reply in got]
    assert set(endings) <= {"whole", "refused"}, [reply.error for _, reply in got if reply.error]
    assert endings[-IN_FLIGHT:] == ["whole"] * IN_FLIGHT
    assert all(reply.equals(expected[ask.name]) for ask, reply in got if reply.ending == "whole")
    print(f"{len(got)} answers, {endings.count('refused')} refused")
