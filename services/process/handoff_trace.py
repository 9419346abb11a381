"""When each hop of a handoff happened, on both sides, so that its latency can be told hop by hop.

Each worker keeps the times of its last handoffs and serves them at /debug/handoffs; `hop_latencies` joins the two
sides. Times are Unix seconds: between hosts they are as good as the hosts' clocks.
"""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.request import urlopen

import numpy as np

from broker.handoff.sender import Key

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
"""Pairs of moments: the steps of one handoff in order, the way of the tensor alone, and the whole.

`landed`: all bytes are checked, in the memory that the cache has reserved for them. `stored`: its engine has noted it,
after the step that it was in.
"""
MAX_KEPT: Final = 4096


class HandoffTrace:
    """The moments of the last MAX_KEPT handoffs of one instance."""

    def __init__(self) -> None:
        self._times_s: OrderedDict[Key, dict[str, float]] = OrderedDict()

    def mark(self, key: Key, moment: str, at_s: float | None = None) -> bool:
        """Note a moment, now unless given. The first time counts; False where this is a later one."""
        times_s = self._times_s.get(key)
        if times_s is None:
            times_s = self._times_s[key] = {}
            while len(self._times_s) > MAX_KEPT:
                self._times_s.popitem(last=False)
        if moment in times_s:
            return False
        times_s[moment] = time.time() if at_s is None else at_s
        return True

    def elapsed_s(self, key: Key, start: str, end: str) -> float | None:
        """Seconds between two moments; None where one is missing."""
        times_s = self._times_s.get(key, {})
        return times_s[end] - times_s[start] if start in times_s and end in times_s else None

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"request_id": key[0], "input_id": key[1], "attempt": key[2], "times_s": times_s}
            for key, times_s in self._times_s.items()
        ]


def hop_latencies(sides: Iterable[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Seconds per hop over all handoffs that the given sides (the answers of /debug/handoffs) have in common."""
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
    """A table: hop, count, p50 and p99 in milliseconds."""
    lines = [f"{'hop':<38} {'n':>6} {'p50 ms':>9} {'p99 ms':>9}"]
    for hop, values in latencies.items():
        if values:
            p50, p99 = np.percentile(np.asarray(values) * 1e3, [50, 99])
            lines.append(f"{hop:<38} {len(values):>6} {p50:>9.3f} {p99:>9.3f}")
    return "\n".join(lines)


if __name__ == "__main__":  # python -m services.process.handoff_trace http://127.0.0.1:9001 http://127.0.0.1:9002
    answers = []
    for url in sys.argv[1:]:
        with urlopen(f"{url}/debug/handoffs", timeout=10) as reply:
            answers.append(json.load(reply))
    print(summary(hop_latencies(answers)))
