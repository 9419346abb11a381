"""Moments of each handoff, noted on both sides: the latency of a handoff, hop by hop.

Each worker keeps the times of its last handoffs and serves them at /debug/handoffs; `hop_latencies` joins two sides.
Times are Unix seconds: between hosts they are as good as the hosts' clocks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from prometheus_client import Histogram

from broker.handoff.sender import Key
from common.telemetry import get_logger

HOPS: Final = (
    ("encode_received", "preprocessed"),
    ("preprocessed", "offer_sent"),
    ("offer_sent", "offer_received"),
    ("offer_received", "granted"),
    ("granted", "grant_received"),
    ("grant_received", "encode_start"),
    ("encode_start", "encode_done"),
    ("encode_done", "tensor_sent"),
    ("tensor_sent", "tensor_received"),
    ("tensor_received", "landed"),
    ("landed", "stored"),
    ("stored", "receipt_received"),
    ("encode_done", "landed"),
    ("encode_done", "stored"),
    ("offer_sent", "receipt_received"),
)
"""Pairs of moments: the steps of one handoff in order, the path of the tensor alone, and the whole.

`landed`: all bytes are checked, in reserved memory. `stored`: the engine has noted the tensor, between two steps.
"""
MAX_KEPT: Final = 4096
_SENDERS_HOPS: Final = {"grant_received": "offer_sent", "receipt_received": "tensor_sent"}


log = get_logger()


class HandoffTrace:
    """The moments of the last MAX_KEPT handoffs of one instance."""

    def __init__(self, hop_seconds: Histogram | None = None) -> None:
        """`hop_seconds` counts hops between two moments of this instance, by a label like "granted_to_stored"."""
        self._hop_seconds = hop_seconds
        self._times_s: OrderedDict[Key, dict[str, float]] = OrderedDict()

    def mark(self, key: Key, moment: str, at_s: float | None = None, since: str | None = None) -> None:
        """Note a moment, now unless given; only the first time counts. The hop `since` a noted moment is observed."""
        times_s = self._times_s.get(key)
        if times_s is None:
            times_s = self._times_s[key] = {}
            while len(self._times_s) > MAX_KEPT:
                self._times_s.popitem(last=False)
        if moment in times_s:
            return
        times_s[moment] = time.time() if at_s is None else at_s
        log.debug("handoff", moment=moment, request=key[0], input=key[1], attempt=key[2], at_s=at_s)
        if since in times_s and self._hop_seconds is not None:
            self._hop_seconds.labels(f"{since}_to_{moment}").observe(max(0.0, times_s[moment] - times_s[since]))

    def mark_sent(self, key: Key, times_s: Mapping[str, float]) -> None:
        """Note the moments of a finished handoff at its sender."""
        for moment, at_s in times_s.items():
            self.mark(key, moment, at_s, since=_SENDERS_HOPS.get(moment))

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"request_id": key[0], "input_id": key[1], "attempt": key[2], "times_s": times_s}
            for key, times_s in self._times_s.items()
        ]


def hop_latencies(sides: Iterable[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Return seconds per hop over all handoffs known to both sides (answers of /debug/handoffs)."""
    joined: dict[Key, dict[str, float]] = {}
    for side in sides:
        for entry in side:
            key = (entry["request_id"], entry["input_id"], entry["attempt"])
            joined.setdefault(key, {}).update(entry["times_s"])
    return {
        f"{start} -> {end}": [times[end] - times[start] for times in joined.values() if start in times and end in times]
        for start, end in HOPS
    }


def summary(latencies: Mapping[str, list[float]]) -> str:
    """Return a table: hop, count, p50 and p99 in milliseconds; without any handoff a sentence."""
    if not any(latencies.values()):
        return "no handoff yet: ask about an input, of a cluster whose encoder or prefill is a process of its own"
    lines = [f"{'hop':<38} {'n':>6} {'p50 ms':>9} {'p99 ms':>9}"]
    for hop, values in latencies.items():
        if values:
            p50, p99 = np.percentile(np.asarray(values) * 1e3, [50, 99])
            lines.append(f"{hop:<38} {len(values):>6} {p50:>9.3f} {p99:>9.3f}")
    return "\n".join(lines)
