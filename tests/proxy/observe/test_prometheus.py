"""A real Prometheus reads a cluster by one address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from common.process.ports import free_port
from tests import debian
from tests.eventually import eventually
from tests.proxy.observe.test_scrape import TEXT, worker

CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - {{job_name: whole, honor_labels: true, metrics_path: /metrics/cluster, static_configs: [{{targets: ["{proxy}"]}}]}}
  - {{job_name: each, http_sd_configs: [{{url: "http://{proxy}/metrics/targets"}}]}}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_prometheus_reads_all_instances_and_discovers_each(serve, tmp_path: Path):
    program = debian.program_or_skip("prometheus", "usr/bin/prometheus")
    async with worker(TEXT) as (good, _), serve(encoders=0, decoders=0) as rig, httpx.AsyncClient() as http:
        await rig.cluster.add_decoder(http_address=good)
        await rig.wait_for_workers()
        proxy = rig.base_url.removeprefix("http://").partition("/")[0]
        config, port = tmp_path / "prometheus.yaml", free_port("127.0.0.1")
        config.write_text(CONFIG.format(proxy=proxy))
        server = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stderr=asyncio.subprocess.DEVNULL,
        )

        async def value(query: str) -> str | None:
            try:
                answer = await http.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query})
            except httpx.HTTPError:
                return None
            found = answer.json()["data"]["result"] if answer.is_success else []  # it refuses until it has started
            return found[0]["value"][1] if found else None

        async def wait_for(query: str, expected: str) -> None:
            async def is_there() -> bool:
                return await value(query) == expected

            await eventually(is_there, 30.0)

        try:
            await wait_for('triptych_up{instance="pd0",role="prefill_decode",job="whole"}', "1")
            await wait_for('triptych_steps_total{instance="pd0",job="whole"}', "3")
            await wait_for('triptych_steps_total{instance="pd0",role="prefill_decode",job="each"}', "3")
            await wait_for('up{job="whole"}', "1")
            await wait_for('vllm:num_requests_running{job="whole"}', "0")
        finally:
            server.terminate()
            await server.wait()
