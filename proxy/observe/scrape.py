"""Metrics of the whole cluster: every instance is asked at its registered address, and the answers are merged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from common.config import Settings
from common.errors import TriptychError
from common.keys import bearer, cluster_token, own_api_key
from common.messages import InstanceRecord
from common.telemetry import get_logger
from proxy.service import Service

DEADLINE_S: Final = 5.0
"""Limit of the whole scrape: half of the ten seconds after which Prometheus gives up."""
MAX_CONNECTIONS: Final = 32
MAX_BYTES: Final = 4 * 2**20
"""Limit of one answer; a worker's has some 60 kB."""

log = get_logger()


@dataclass(eq=False, repr=False)
class ClusterMetrics:
    """Asks all instances in parallel. Callers that come during a scrape get the same answer."""

    _service: Service
    _running: asyncio.Task[bytes] | None = None
    _headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    async def render(self) -> bytes:
        """Return Prometheus' text format, each sample with `instance` and `role`, after DEADLINE_S at the latest."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._scrape())
        return await asyncio.shield(self._running)

    async def _scrape(self) -> bytes:
        service = self._service
        with contextlib.suppress(TriptychError):  # a key file that is being written: the last keys stay
            self._headers = _headers(service.settings)
        own = service.instance_id
        others = [record for name, record in service.pool.seen.items() if name != own]
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        timeout = httpx.Timeout(DEADLINE_S)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            texts = await asyncio.gather(*(self._ask(client, record) for record in others))
        answers: dict[tuple[str, str], str | None] = {}
        for record, text in zip(others, texts, strict=True):
            answers[record.instance_id, record.role] = text
        service.update_gauges()
        answers[own, "proxy"] = generate_latest(service.metrics.registry).decode()
        page, silent = await asyncio.to_thread(merge, answers)
        for _, role in silent:
            service.metrics.scrape_failures.labels(role).inc()
        return page

    async def _ask(self, client: httpx.AsyncClient, record: InstanceRecord) -> str | None:
        """Return an instance's metrics; None without a right answer within DEADLINE_S."""
        kind, content = "proxy" if record.role == "proxy" else "worker", bytearray()
        try:
            asked = client.stream("GET", f"{record.base_url}/metrics", headers=dict(self._headers[kind]))
            async with asyncio.timeout(DEADLINE_S), asked as response:
                response.raise_for_status()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_BYTES:
                        raise ValueError(f"more than {MAX_BYTES} bytes of metrics")
            return content.decode()
        except Exception as error:
            log.warning("no metrics from an instance", instance_asked=record.instance_id, error=repr(error))
            return None


def targets(service: Service) -> list[dict[str, Any]]:
    """Return all instances as Prometheus' HTTP service discovery expects them (`http_sd_config`)."""
    return [
        {
            "targets": [urlsplit(record.base_url).netloc],
            "labels": {"instance": name, "role": record.role, "model": record.model},
        }
        for name, record in sorted(service.pool.seen.items())
    ]


def merge(answers: Mapping[tuple[str, str], str | None]) -> tuple[bytes, list[tuple[str, str]]]:
    """Merge metrics by (instance, role) into one text; None is an instance without an answer.

    Returns the text, and the instances left out: without an answer, or with one that is not Prometheus' format. A
    family that is of another kind at an earlier instance is left out, too.
    """
    families: dict[str, Metric] = {}
    up = GaugeMetricFamily("triptych_up", "1 for an instance that answered, else 0.", labels=["instance", "role"])
    silent = []
    for (instance, role), text in sorted(answers.items()):
        try:
            found = None if text is None else [*text_string_to_metric_families(text)]
        except (ValueError, KeyError, IndexError) as error:
            log.warning("metrics that cannot be read", instance_asked=instance, error=repr(error))
            found = None
        up.add_metric([instance, role], 0 if found is None else 1)
        if found is None:
            silent.append((instance, role))
        for family in found or ():
            _add(families, family, {"instance": instance, "role": role})
    return generate_latest(_Families([up, *families.values()])), silent


def _add(families: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
    whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    if whole.type != family.type:
        return
    for sample in family.samples:
        # A gauge by role keeps that label: which instance says it stands beside.
        whole.add_sample(sample.name, {**labels, **sample.labels, "instance": labels["instance"]}, sample.value)


@dataclass(eq=False, repr=False)
class _Families(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _headers(settings: Settings) -> dict[str, dict[str, str]]:
    """Return the key for each kind of instance: workers take the cluster's token, proxies an API key."""
    api_key = own_api_key(settings)
    keys = {"proxy": api_key, "worker": cluster_token(settings) or api_key}
    return {kind: {} if key is None else {"Authorization": bearer(key)} for kind, key in keys.items()}
