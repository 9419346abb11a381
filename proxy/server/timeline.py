"""Timelines of recent requests: when and where each stage ran."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from common.messages import Span

KEPT_REQUESTS: Final = 1000
MAX_SPANS: Final = 512
"""Limit per request. Later spans of a longer request (an hour of audio) are discarded."""


class Timelines:
    """Spans by request id; the oldest request is discarded first."""

    def __init__(self, kept: int = KEPT_REQUESTS) -> None:
        self._kept = kept
        self._spans: OrderedDict[str, list[Span]] = OrderedDict()

    def open(self, request_id: str) -> bool:
        """Start the timeline of a request; return False if already started. Spans of other requests are discarded."""
        if request_id in self._spans:
            return False
        self._spans[request_id] = []
        while len(self._spans) > self._kept:
            self._spans.popitem(last=False)
        return True

    def add(self, request_id: str, spans: Iterable[Span]) -> None:
        known = self._spans.get(request_id)
        if known is not None:
            known.extend(list(spans)[: MAX_SPANS - len(known)])

    def get(self, request_id: str) -> dict[str, Any] | None:
        """Return a timeline as JSON, in order of start; None for an unknown or discarded request."""
        spans = self._spans.get(request_id)
        if spans is None:
            return None
        ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s))
        return {"request_id": request_id, "spans": [msgspec.to_builtins(span) for span in ordered]}
