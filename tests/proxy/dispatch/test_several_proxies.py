"""Several proxies of one cluster behind a plain balancer: they share what caches hold, and the limit of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from common.messages import Encode, Generate
from proxy.service import Service
from tests.proxy.conftest import ProxyHarness, eventually, running_proxy
from tests.proxy.sample_media import image_part, picture
from tests.proxy.streams import gather

OPENING = "the same beginning " * 40


@asynccontextmanager
async def beside(rig: ProxyHarness, name: str = "other") -> AsyncIterator[ProxyHarness]:
    """One more proxy of the cluster; both know of each other, and of all workers."""
    service = Service(rig.service.settings, rig.service.info, name)
    async with running_proxy(service) as (base_url, server):
        client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=20)
        async with client, httpx.AsyncClient(base_url=base_url, timeout=20) as http:
            other = ProxyHarness(service, rig.cluster, base_url, client, http, server)
            await other.wait_for_workers()
            await eventually(lambda: rig.service.pool.num_proxies == other.service.pool.num_proxies == 2)
            yield other
    await eventually(lambda: rig.service.pool.num_proxies == 1)


async def heard(proxy: ProxyHarness, number: int) -> None:
    """Return once the proxy has learnt where so many prompts were placed, its own among them."""
    table = proxy.service.dispatcher._placer._computed._instances
    await eventually(lambda: sum(map(bool, table)) >= number)


async def test_a_conversation_goes_on_where_another_proxy_began_it(serve):
    async with serve(decoders=3) as rig, beside(rig) as other:
        await rig.chat(OPENING)
        await heard(other, 1)
        for proxy in (other, rig, other):
            await proxy.chat(f"{OPENING} And what does it say?")
        assert sorted(len(decoder.of(Generate)) for decoder in rig.cluster.decoders) == [0, 0, 4]
        assert [one.count("affinity_total", outcome="unknown") for one in (rig, other)] == [1, 0]
        assert [one.count("affinity_total", outcome="hit") for one in (rig, other)] == [1, 2]


async def test_both_halves_of_a_pair_are_found_again_by_another_proxy(serve):
    async with serve(decoders=0, pairs=(2, 2)) as rig, beside(rig) as other:
        await rig.chat(OPENING)
        await heard(other, 1)
        await other.chat(OPENING)
        for workers in (rig.cluster.prefills, rig.cluster.decoders):
            assert sorted(len(worker.of(Generate)) for worker in workers) == [0, 2]
        assert other.count("decode_affinity_total", outcome="hit") == 1


async def test_equal_pictures_meet_at_one_encoder_whichever_proxy_they_came_by(serve):
    async with serve(encoders=3) as rig, beside(rig) as other:
        for proxy in (rig, other, rig, other):
            await proxy.chat([image_part(picture("#123456"))])
        assert sorted(len(encoder.of(Encode)) for encoder in rig.cluster.encoders) == [0, 0, 4]


async def test_the_limit_of_requests_is_shared_out_among_the_proxies_that_are_there(serve):
    async with serve(max_inflight=4) as rig:
        (decoder,) = rig.cluster.decoders
        decoder.pause_after = 1
        async with beside(rig) as other:
            streams = [await proxy.chat(stream=True) for proxy in (rig, other) for _ in range(2)]
            for proxy in (rig, other):
                with pytest.raises(openai.RateLimitError, match="2 requests are under way, at most 2 are allowed"):
                    await proxy.chat()
            decoder.resume.set()
            await asyncio.gather(*map(gather, streams))
        decoder.resume.clear()
        streams = [await rig.chat(stream=True) for _ in range(4)]
        with pytest.raises(openai.RateLimitError, match="at most 4 are allowed"):
            await rig.chat()
        decoder.resume.set()
        await asyncio.gather(*map(gather, streams))


async def test_a_proxy_alone_tells_nobody_and_does_not_mind_what_it_cannot_read(serve, redis):
    async with serve() as rig:
        async with redis.pubsub() as listener:
            channel = f"{rig.cluster.name}:changes"
            await listener.subscribe(channel)
            assert (await listener.get_message(timeout=5))["type"] == "subscribe"
            await rig.chat(OPENING)
            await redis.publish(channel, b"no message of ours")
            message = await listener.get_message(timeout=5)
            assert message["data"] == b"no message of ours"
        await rig.chat(OPENING)
        assert rig.count("affinity_total", outcome="hit") == 1
