"""The registry: who is alive, who is not, and what happens when Redis forgets."""

from __future__ import annotations

from contextlib import aclosing
from types import SimpleNamespace
from urllib.parse import urlsplit

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError
from structlog.testing import capture_logs

from broker.cluster.redis_client import connect
from broker.cluster.registry import RECORD_TTL_S, Registry, incompatibility
from common.errors import TriptychError
from common.messages import PROTOCOL_VERSION
from tests.broker.conftest import make_record, running
from tests.eventually import eventually


async def test_registered_instances_are_seen_by_others_and_leave_nothing_behind(redis: Redis) -> None:
    encoder, decoder, reader = (Registry(redis, "c") for _ in range(3))
    await encoder.register(make_record("e0"))
    await decoder.register(make_record("d0", "prefill_decode"))
    assert set(await reader.instances()) == {"e0", "d0"}
    assert 0 < await redis.ttl("c:instance:e0") <= RECORD_TTL_S
    await decoder.heartbeat(outstanding=7)
    found = await reader.get("d0")
    assert found is not None
    assert found.outstanding == 7
    for registry in (encoder, decoder, decoder):
        await registry.unregister()
    assert await reader.instances() == {}
    assert await redis.keys("*") == []


async def test_some_instances_are_found_without_a_look_at_all(redis: Redis) -> None:
    registries = {name: Registry(redis, "c") for name in ("e0", "d0", "d1")}
    for name, registry in registries.items():
        await registry.register(make_record(name))
    assert set(await registries["e0"].find(["d1", "e0", "gone"])) == {"d1", "e0"}
    assert await registries["e0"].find([]) == {}
    for registry in registries.values():
        await registry.unregister()


async def test_clusters_do_not_see_each_other(redis: Redis) -> None:
    await Registry(redis, "one").register(make_record("e0"))
    assert await Registry(redis, "two").instances() == {}


async def test_an_instance_that_stops_beating_disappears_from_the_index_too(redis: Redis) -> None:
    registry = Registry(redis, "c")
    await registry.register(make_record("e0"))
    await redis.delete("c:instance:e0")  # what its expiry does
    assert await registry.instances() == {}
    assert await redis.smembers("c:instances") == set()


async def test_a_flushed_redis_knows_an_instance_again_after_its_next_heartbeat(redis: Redis) -> None:
    registry = Registry(redis, "c")
    await registry.register(make_record("e0"))
    await redis.flushall()
    await registry.heartbeat()
    assert set(await registry.instances()) == {"e0"}


async def test_a_restarted_instance_takes_over_its_id_and_the_older_process_learns_it(redis: Redis) -> None:
    old, new = Registry(redis, "c"), Registry(redis, "c")
    await old.register(make_record("e0", epoch=1))
    await new.register(make_record("e0", epoch=2))
    with pytest.raises(TriptychError, match="another process has taken the instance id 'e0'"):
        await old.heartbeat()
    await new.heartbeat()
    await old.unregister()
    assert (await new.instances())["e0"].epoch == 2


async def test_unreadable_entries_are_skipped(redis: Redis) -> None:
    registry = Registry(redis, "c")
    await registry.register(make_record("e0"))
    await redis.sadd("c:instances", "junk")
    await redis.set("c:instance:junk", b"\xff\x00garbage")
    assert set(await registry.instances()) == {"e0"}
    # It may be of another wire version, whose processes can read it.
    assert await redis.smembers("c:instances") == {b"e0", b"junk"}


async def test_an_unreadable_entry_is_told_once_and_again_when_it_has_changed(redis: Redis) -> None:
    registry = Registry(redis, "c")
    await redis.sadd("c:instances", "junk", "rest")
    for name, value in (("junk", b"\xff\x00garbage"), ("rest", b"{}")):
        await redis.set(f"c:instance:{name}", value)
    with capture_logs() as logs:
        for _ in range(3):
            assert await registry.instances() == {}
        assert [line["entry"] for line in logs] == ["junk", "rest"]
        await redis.set("c:instance:junk", msgspec.msgpack.encode({}))
        for _ in range(3):
            await registry.instances()
        assert [line["entry"] for line in logs] == ["junk", "rest", "junk"]


async def test_a_broker_that_is_back_is_told_once_with_the_time_that_it_was_away(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, clock = Registry(redis, "c"), SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("broker.cluster.registry.time", clock)
    with capture_logs() as logs:
        await registry.register(make_record("e0"))
        for now_s in (101.0, 102.5, 109.8, 110.8):
            clock.monotonic = lambda now_s=now_s: now_s
            await registry.heartbeat()
    assert [(entry["event"], entry["away_s"]) for entry in logs] == [("in touch with the broker again", 7.3)]


def test_incompatible_instances_are_named_with_what_differs() -> None:
    one, other = make_record("e0"), make_record("d0", fingerprint="beef")
    assert incompatibility(one, one) is None
    why = incompatibility(one, other)
    assert why is not None
    assert all(word in why for word in ("e0", "d0", "f00d", "beef"))
    why = incompatibility(one, make_record("d0", protocol=PROTOCOL_VERSION + 1))
    assert "protocol" in str(why)
    assert str(why).endswith("start both with the same version of Triptych")
    assert "bfloat16" in str(incompatibility(one, make_record("d0", dtype="bfloat16")))


def test_a_proxy_has_no_dtype_and_has_to_agree_in_all_else() -> None:
    proxy = make_record("p0", "proxy", dtype="")
    assert incompatibility(make_record("d0", dtype="bfloat16"), proxy) is None
    assert "beef" in str(incompatibility(make_record("d0", fingerprint="beef"), proxy))


async def test_who_listens_hears_of_those_that_come_drain_and_leave_and_of_no_heartbeat(redis: Redis) -> None:
    registry, heard = Registry(redis, "c"), 0

    async def listen() -> None:
        nonlocal heard
        async with aclosing(Registry(redis, "c").changes()) as changes:
            async for _ in changes:
                heard += 1

    async with running(listen()):
        await eventually(lambda: heard == 1)
        await registry.register(make_record("e0"))
        await eventually(lambda: heard == 2)
        await registry.heartbeat(outstanding=3)
        await registry.heartbeat(draining=True)
        await eventually(lambda: heard == 3)
        await registry.unregister()
        await eventually(lambda: heard == 4)
    assert await redis.keys("*") == []


async def test_a_user_that_may_neither_tell_nor_listen_is_a_member_all_the_same(redis: Redis, broker_url: str) -> None:
    await redis.execute_command("ACL", "SETUSER", "limited", "on", ">word", "~c:*", "resetchannels", "+@all")
    parts = urlsplit(broker_url)
    try:
        async with connect(f"redis://limited:word@{parts.hostname}:{parts.port}") as limited:
            registry = Registry(limited, "c")
            await registry.register(make_record("e0"))
            assert set(await registry.instances()) == {"e0"}
            with pytest.raises(NoPermissionError):
                await anext(registry.changes())
            await registry.unregister()
    finally:
        await redis.execute_command("ACL", "DELUSER", "limited")
