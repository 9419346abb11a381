"""The way of one media item through the cluster, hop by hop, out of the requests' timelines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from common.messages import Span


class Hop(NamedTuple):
    """Seconds between two moments, one value per request."""

    start: str
    end: str
    seconds: list[float]


_MOMENTS = (
    ("request arrives at the proxy", "proxy", "start_s"),
    ("parsed, hashed, tokenised, sent to both workers", "proxy", "end_s"),
    ("encoder begins to preprocess", "preprocess", "start_s"),
    ("preprocessed, offered", "preprocess", "end_s"),
    ("granted", "grant", "end_s"),
    ("encoder begins to compute", "encode", "start_s"),
    ("encoded", "encode", "end_s"),
    ("tensor sent, receipt back", "handoff", "end_s"),
    ("decoder has all inputs", "inputs", "end_s"),
    ("first token", "prefill", "end_s"),
    ("last token", "decode", "end_s"),
)


def hops(timelines: Sequence[Sequence[Span]]) -> list[Hop]:
    """Consecutive moments of requests with one media item each.

    A moment may come before the one above it (the decoder has the input before the receipt is back at the encoder):
    then the difference is negative. Requests whose timeline lacks a moment are left out.
    """
    complete = [moments for spans in timelines if (moments := _moments(spans)) is not None]
    return [
        Hop(start[0], end[0], [moments[number + 1] - moments[number] for moments in complete])
        for number, (start, end) in enumerate(pairwise(_MOMENTS))
        if complete
    ]


def _moments(spans: Sequence[Span]) -> list[float] | None:
    by_stage = {span.stage: span for span in spans}
    if any(stage not in by_stage for _, stage, _ in _MOMENTS):
        return None
    return [float(getattr(by_stage[stage], edge)) for _, stage, edge in _MOMENTS]
