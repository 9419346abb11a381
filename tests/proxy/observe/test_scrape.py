"""/metrics/cluster and /metrics/targets of a real proxy, with workers that answer, fall silent and lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.observe import scrape
from proxy.observe.scrape import merge

TEXT = b"# HELP triptych_steps_total Passes.\n# TYPE triptych_steps_total counter\ntriptych_steps_total 3.0\n"
ENDLESS = b"triptych_a 1\n" * (scrape.MAX_BYTES // 13 + 1)


@asynccontextmanager
async def worker(body: bytes | None, status: bytes = b"200 OK") -> AsyncIterator[tuple[str, list[bytes]]]:
    """An HTTP server with one answer, or with none. Yields the address, and the heads of all requests."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        if body is not None:
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"http://{host}:{port}", heads
    server.close()


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name and instance."""
    return {
        (sample.name, sample.labels["instance"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_all_instances_are_at_one_address_and_the_silent_are_counted(serve, monkeypatch):
    monkeypatch.setattr(scrape, "DEADLINE_S", 1.0)
    async with (
        worker(TEXT) as (good, _),
        worker(b"\xff{ not metrics") as (bad, _),
        worker(TEXT, b"503 Busy") as (busy, _),
        worker(None) as (silent, _),
        worker(ENDLESS) as (endless, _),
        serve(encoders=0, decoders=0) as rig,
    ):
        for url in (good, bad, busy, silent, endless):
            await rig.cluster.add_decoder(http_address=url)
        await rig.wait_for_workers()
        found = samples((await rig.http.get("/metrics/cluster")).text)
        up = {instance: value for (name, instance), value in found.items() if name == "triptych_up"}
        assert up == {"pd0": 1, "pd1": 0, "pd2": 0, "pd3": 0, "pd4": 0, rig.service.instance_id: 1}
        assert found["triptych_steps_total", "pd0"] == 3
        assert found["triptych_proxy_inflight", rig.service.instance_id] == 0
        assert rig.count("scrape_failures_total", role="prefill_decode") == 4


async def test_callers_at_the_same_time_share_one_scrape(serve):
    async with worker(TEXT) as (good, heads), serve(encoders=0, decoders=0) as rig:
        await rig.cluster.add_decoder(http_address=good)
        await rig.wait_for_workers()
        answers = await asyncio.gather(*(rig.http.get("/metrics/cluster") for _ in range(5)))
        assert {answer.status_code for answer in answers} == {200}
        assert 1 <= len(heads) < 5


async def test_targets_are_what_prometheus_discovers(serve):
    async with worker(TEXT) as (good, _), serve(encoders=0, decoders=0) as rig:
        await rig.cluster.add_decoder(http_address=good)
        await rig.wait_for_workers()
        (found,) = [one for one in (await rig.http.get("/metrics/targets")).json() if one["labels"]["role"] != "proxy"]
        labels = {"instance": "pd0", "role": "prefill_decode", "model": "signpost"}
        assert found == {"targets": [good.removeprefix("http://")], "labels": labels}


async def test_workers_are_asked_with_the_clusters_token_and_strangers_get_nothing(serve):
    async with worker(TEXT) as (good, heads), serve(encoders=0, decoders=0, api_key="a-key") as rig:
        await rig.cluster.add_decoder(http_address=good)
        await rig.wait_for_workers()
        assert (await rig.http.get("/metrics/cluster", headers={"authorization": ""})).status_code == 401
        assert (await rig.http.get("/metrics/cluster", headers={"authorization": "Bearer a-key"})).status_code == 200
        assert b"authorization: bearer a-key" in heads[0].lower()


@pytest.mark.parametrize("kind", ["gauge", "histogram"])
def test_a_family_of_another_kind_is_left_out_and_the_first_kept(kind: str):
    name: Callable[[str], str] = "triptych_a{}".format
    first = f"# TYPE {name('')} gauge\n{name('')} 1\n"
    second = f"# TYPE {name('')} {kind}\n{name('')} 2\n"
    page, silent = merge({("a", "encoder"): first, ("b", "encoder"): second})
    found = samples(page.decode())
    assert silent == []
    assert found["triptych_a", "a"] == 1
    assert found.get(("triptych_a", "b")) == (2 if kind == "gauge" else None)


def test_a_label_of_the_instance_keeps_its_own_role():
    page, _ = merge({("proxy-1", "proxy"): '# TYPE w gauge\nw{role="encoder"} 2\n'})
    assert b'w{instance="proxy-1",role="encoder"} 2.0' in page
