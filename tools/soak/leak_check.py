"""What a cluster holds of requests: nothing at all where none runs. Whatever stays is a leak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from redis import Redis

from common.keys import bearer, cluster_token, own_api_key

if TYPE_CHECKING:
    from common.config import Settings
    from launch.cluster.instance import Instance
    from launch.cluster.local_cluster import LocalCluster

EARLY_OFFERS: Final = "early_offers"
GAUGES: Final = (
    "requests_outstanding",
    "requests_outstanding_tokens",
    "requests_running",
    "requests_waiting",
    "kv_blocks_used",
    "kv_host_blocks_used",
    "encoder_cache_references",
    "inputs_pending",
    "inputs_granted",
    "inputs_landing",
    "inputs_encoding_here",
    "offers_open",
    "kv_offers_pending",
    EARLY_OFFERS,
    "kv_reserved_requests",
    "channel_messages_waiting",
    "encoder_items_open",
    "encoder_items_computing",
    "encoder_queue_items",
    "encoder_held_bytes",
    "handoffs_open",
    "prefills_open",
    "preprocess_waiting",
    "integrity_failures",
    "proxy_inflight",
    "proxy_flights",
    "proxy_held_bytes",
)
"""Zero where nothing is held; every role has some of them."""
_TIMEOUT_S: Final = 5.0


def gauges(instance: Instance, settings: Settings) -> dict[str, float]:
    """All metrics of one instance that have no labels, by name without the prefix; raises as `samples`."""
    return {one.name.removeprefix("triptych_"): one.value for one in samples(instance, settings) if not one.labels}


def samples(instance: Instance, settings: Settings) -> list[Sample]:
    """All metrics of one instance; raises as `ask`."""
    families = text_string_to_metric_families(ask(instance, "/metrics", settings).text)
    return [sample for family in families for sample in family.samples]


def ask(instance: Instance, path: str, settings: Settings) -> httpx.Response:
    """Return an instance's answer at a path. Raises httpx.HTTPError for an error, and without one in five seconds."""
    key = own_api_key(settings) if instance.role == "proxy" else cluster_token(settings)
    headers = {} if key is None else {"Authorization": bearer(key)}
    url = f"{instance.http_address}{path}"
    return httpx.get(url, headers=headers, trust_env=False, timeout=_TIMEOUT_S).raise_for_status()


def held(cluster: LocalCluster) -> dict[str, float]:
    """Everything that is not zero though nothing runs: gauges, stream entries, keys that nobody knows.

    An instance that is not ready, or whose metrics cannot be read, counts as one.
    """
    found: dict[str, float] = {}
    settings = cluster.supervisor.plan.settings
    for instance in cluster.instances.values():
        if instance.state == "left":  # drained
            continue
        if instance.state != "ready":
            found[f"{instance.id} is {instance.state}"] = 1.0
            continue
        try:
            values = gauges(instance, settings)
        except httpx.HTTPError as error:
            found[f"{instance.id} does not answer: {error!r}"] = 1.0
        else:
            found |= {f"{instance.id} {name}": values[name] for name in GAUGES if values.get(name)}
    with Redis.from_url(cluster.broker_url, socket_timeout=_TIMEOUT_S) as redis:
        found |= held_in_broker(redis, settings.cluster, cluster.instances)
    return found


def held_in_broker(redis: Redis, cluster: str, instance_ids: Iterable[str]) -> dict[str, float]:
    """Entries of streams, and keys beside the registry and the streams of these instances."""
    found: dict[str, float] = {}
    ids = set(instance_ids)
    for key in sorted(key.decode() for key in redis.scan_iter(match=f"{cluster}:*")):
        owner, _, kind = key.removeprefix(f"{cluster}:").rpartition(":")
        if kind in ("metadata", "allocated", "injected") and owner in ids:
            found |= {f"entries of {key}": size} if (size := redis.xlen(key)) else {}
        elif not (kind == "instances" or (owner == "instance" and kind in ids)):
            found[f"key {key}"] = 1.0
    return found
