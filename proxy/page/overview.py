"""JSON of the cluster and of recent requests, from what this proxy knows already: no worker is asked."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from common.errors import invalid
from common.messages import PROTOCOL_VERSION, InstanceRecord
from proxy.server.metrics import KEPT_REQUESTS
from proxy.service import Service

LISTED_REQUESTS: Final = 50
LISTED_SPANS: Final = 64
"""Spans of a listed request; the timeline of one request has the rest."""
_CACHES: Final = (
    ("kv", "blocks", "kv_blocks_used", "kv_blocks_usable"),
    ("encoder inputs", "bytes", "encoder_cache_bytes_used", "encoder_cache_bytes_capacity"),
    ("encoder outputs", "bytes", "encoder_output_cache_bytes_used", "encoder_output_cache_bytes"),
)
"""Name, unit, and the figures of use and capacity."""
_QUEUES: Final = {
    "preprocess_waiting": "preprocess",
    "encoder_queue_items": "encode",
    "inputs_pending": "inputs without room",
    "offers_open": "offers from others",
    "handoffs_open": "handoffs to others",
    "prefills_open": "prefills for others",
}


def cluster(service: Service) -> dict[str, Any]:
    """Return the cluster as of the last look at the registry, at most half a second ago while the broker answers."""
    problem = service.not_ready()
    info, pool = service.info, service.pool
    records = sorted(pool.seen.values(), key=lambda record: (record.role, record.instance_id))
    return {
        "object": "cluster",
        "cluster": service.settings.cluster,
        "model": service.model_name,
        "architecture": info.architecture,
        "media": [kind for kind in info.media_kinds if kind != "text"],
        "chats": info.media_kind != "text" and (service.transcribes or service.text.has_chat_template),
        "transcribes": service.transcribes,
        "max_model_len": service.max_model_len,
        "version": own_version(),
        "protocol": PROTOCOL_VERSION,
        "time_s": time.time(),
        "ready": not problem,
        "reason": "; ".join(problem) or None,
        "handoffs_per_s": service.metrics.handoffs.per_s,
        "requests": {"running": service.admission.inflight, "limit": service.admission.limit},
        "queues": {
            name: {"waiting": line.num_waiting, "expected_wait_s": line.wait_s} for name, line in service.lines.items()
        },
        "instances": [_instance(service, record) for record in records],
    }


def requests(service: Service, limit: str | None) -> dict[str, Any]:
    """Return the last requests, the newest first, as many as the query's `limit`.

    Raises TriptychError("invalid_request") for a limit that is no number from 1 to KEPT_REQUESTS.
    """
    given = str(LISTED_REQUESTS) if limit is None else limit
    count = int(given) if given.isdecimal() and len(given) < 6 else 0
    if not 1 <= count <= KEPT_REQUESTS:
        raise invalid(f"limit must be a number from 1 to {KEPT_REQUESTS}, not {given[:80]!r}", "limit")
    records = service.timelines.latest(count)
    return {"object": "list", "data": [record.to_json(LISTED_SPANS) for record in records]}


def _instance(service: Service, record: InstanceRecord) -> dict[str, Any]:
    state, reason = _state(service, record)
    figures = {name: round(value) for name, value in record.figures.items()}
    worker = service.pool.find(record.instance_id)
    return {
        "id": record.instance_id,
        "role": record.role,
        "state": state,
        "reason": reason,
        "model": record.model,
        "dtype": record.dtype or None,
        "protocol": record.protocol,
        "started_s": record.epoch / 1e9,
        "encodes": record.encodes or record.role == "encoder",
        "next_role": record.next_role,
        "outstanding": record.outstanding,
        "outstanding_tokens": record.outstanding_tokens,
        "from_here": 0 if worker is None else worker.load.requests + worker.load.items,
        "running": figures.get("requests_running", figures.get("encoder_items_open")),
        "waiting": figures.get("requests_waiting", figures.get("preprocess_waiting")),
        "queues": {name: figures[figure] for figure, name in _QUEUES.items() if figure in figures},
        "caches": [
            {"name": name, "unit": unit, "used": figures[used], "capacity": figures[capacity]}
            for name, unit, used, capacity in _CACHES
            if figures.get(capacity) and used in figures
        ],
    }


def _state(service: Service, record: InstanceRecord) -> tuple[str, str | None]:
    """Return the state of an instance as this proxy sees it, and the reason of a bad one."""
    pool = service.pool
    if record.role == "proxy":
        return "draining" if record.draining else "ready", None
    if (why := pool.refused.get(record.instance_id)) is not None:
        return "refused", why
    worker = pool.find(record.instance_id)
    if worker is None:
        return "lost", "the connection is lost; the registry has not dropped the entry yet"
    if record.draining:
        return "draining", "finishes its requests and takes no new ones"
    if worker.missing_since_s is not None:
        return "missing", "not in the registry at the last look"
    return ("ready", None) if worker.admitted else ("connecting", None)


def own_version() -> str | None:
    """Return the installed version of Triptych; None in a checkout that is not installed."""
    try:
        return version("triptych")
    except PackageNotFoundError:
        return None
