"""Instances present in the cluster, by recent looks at the registry."""

from __future__ import annotations

import time
from typing import Final

from broker.cluster.registry import HEARTBEAT_S
from common.messages import InstanceRecord

ABSENCE_S: Final = 3.0
BLIND_S: Final = 2.0
"""Longer than this between two looks at the registry, it could not be seen."""


class Presence:
    """Count an instance as gone after ABSENCE_S without an entry. A restart of Redis empties the registry for a moment
    and ends no handoff. Time with an unreachable broker does not count beyond the usual interval between two looks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[InstanceRecord, float]] = {}
        self._looked_s = time.monotonic()

    def note(self, record: InstanceRecord) -> None:
        """This instance has just been seen."""
        self._seen[record.instance_id] = record, time.monotonic()

    def get(self, instance_id: str) -> InstanceRecord | None:
        """Return an instance seen within the last ABSENCE_S seconds, or None."""
        record, seen_s = self._seen.get(instance_id, (None, 0.0))
        return record if time.monotonic() - seen_s < ABSENCE_S else None

    def look(self, instances: dict[str, InstanceRecord]) -> dict[str, InstanceRecord]:
        """Record the registry's present content; return all present instances. Called with the heartbeat."""
        now_s = time.monotonic()
        if (between_s := now_s - self._looked_s) > BLIND_S:
            blind_s = between_s - HEARTBEAT_S
            self._seen = {i: (record, min(now_s, seen_s + blind_s)) for i, (record, seen_s) in self._seen.items()}
        self._looked_s = now_s
        self._seen.update({instance_id: (record, now_s) for instance_id, record in instances.items()})
        self._seen = {i: seen for i, seen in self._seen.items() if now_s - seen[1] < ABSENCE_S}
        return {i: record for i, (record, _) in self._seen.items()}
