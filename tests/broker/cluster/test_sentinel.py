"""The broker behind sentinels: its clients follow the server that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from broker.cluster.redis_client import CONNECTION_ERRORS, connect, wait_until_reachable, without_secrets
from common.errors import TriptychError
from tests.broker.sentinels import NAME, Group, sentinel_group
from tests.eventually import eventually


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with sentinel_group(tmp_path) as running:
        yield running


async def test_a_client_follows_to_the_server_that_leads_after_a_kill(group: Group) -> None:
    async with connect(group.url) as client:
        await wait_until_reachable(client, timeout_s=10)
        await client.set("before", "1")
        await client.wait(1, 5000)  # the replica has it, too
        killed = await asyncio.to_thread(group.kill_leader)
        await wait_until_reachable(client, timeout_s=30)
        assert await client.get("before") == b"1"
        await client.set("after", "2")
        assert group.leader not in (0, killed)


async def test_a_blocking_read_at_a_server_that_stops_to_lead_ends_as_a_lost_connection(group: Group) -> None:
    """And repeated, it reads at the new one."""
    async with connect(group.url) as client, connect(group.url, retries=0) as reading:
        before = group.leader
        asking = asyncio.create_task(reading.xread({"stream": "$"}, block=4900))
        await eventually(lambda: _is_blocked(group, before))
        await asyncio.to_thread(group.hand_over)
        with pytest.raises(CONNECTION_ERRORS):
            await asking
        await wait_until_reachable(reading, timeout_s=20)
        reader = asyncio.create_task(reading.xread({"stream": "$"}, block=4900))
        await eventually(lambda: _is_blocked(group, group.leader))
        await client.xadd("stream", {"number": 1})
        assert len(await reader) == 1


async def test_a_name_that_no_sentinel_knows_is_said(group: Group) -> None:
    async with connect(group.url.replace(f"/{NAME}?", "/other?"), retries=0) as client:
        with pytest.raises(RedisError, match="No master found for 'other'"):
            await client.ping()
        with pytest.raises(TriptychError, match="No master found for 'other'"):
            await wait_until_reachable(client, timeout_s=0.3)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://",
        "redis+sentinel://:word@host:26379",
        "redis+sentinel:///mymaster",
        "redis+sentinel://host:port/mymaster",
        "redis+sentinel://host,:26379/mymaster",
    ],
)
def test_a_url_without_sentinels_or_a_name_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(TriptychError, match="broker URL") as caught:
        connect(url)
    assert "word" not in str(caught.value)


def test_the_database_tls_and_passwords_of_a_url_reach_servers_and_sentinels() -> None:
    url = "rediss+sentinel://me:word@a,b:1/group/3?sentinel_username=us&sentinel_password=own&ssl_ca_certs=/ca.pem"
    pool = connect(url).connection_pool
    given = pool.connection_kwargs
    assert (pool.service_name, given["db"], given["username"], given["password"]) == ("group", 3, "me", "word")  # type: ignore[attr-defined]
    assert given["ssl_ca_certs"] == "/ca.pem"
    places = []
    for sentinel in pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]
        own = sentinel.connection_pool.connection_kwargs
        assert (own["username"], own["password"], own["ssl_ca_certs"]) == ("us", "own", "/ca.pem")
        places.append((own["host"], own["port"]))
    assert places == [("a", 26379), ("b", 1)]
    assert without_secrets(url) == "rediss+sentinel://a,b:1/group/3"


def _is_blocked(group: Group, port: int) -> bool:
    with group.client(port) as server:
        return bool(server.info("clients")["blocked_clients"] == 1)
