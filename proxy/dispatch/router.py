"""Choice of a worker by load and affinity: pure functions over the workers' loads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import mean
from typing import Final, Literal

from common.hashing import rendezvous_score
from proxy.dispatch.worker import Worker

LOAD_FACTOR: Final = 1.25
"""A worker may have this much more than the mean load before cached prompts go elsewhere."""
FREE_ITEMS: Final = 4
"""Items an encoder may always have, and requests a decoder: affinity is worth a short queue."""

Affinity = Literal["hit", "overloaded", "unknown"]
"""Placement of a prompt: on the instance that has it cached; elsewhere due to load; no such instance is known."""

EncoderAffinity = Literal["hit", "overloaded", "avoided"]
"""Placement of an item: on the home encoder of its content, where a cached output would be; elsewhere due to load;
elsewhere because the home encoder has another item of the same request."""


def pick_decoder(candidates: Sequence[Worker], cached_at: str | None = None) -> tuple[Worker, Affinity]:
    """Choose a worker for a prompt: the instance `cached_at` unless overloaded, else the least loaded.

    A worker with FREE_ITEMS requests and more outstanding tokens than LOAD_FACTOR times the mean is overloaded.
    `candidates` must not be empty.
    """
    least = min(candidates, key=lambda one: (outstanding_tokens(one), outstanding_requests(one), one.instance_id))
    home = next((worker for worker in candidates if worker.instance_id == cached_at), None)
    if home is None:
        return least, "unknown"
    share = LOAD_FACTOR * mean(outstanding_tokens(worker) for worker in candidates)
    if home is least or outstanding_requests(home) < FREE_ITEMS or outstanding_tokens(home) <= share:
        return home, "hit"
    return least, "overloaded"


def prefer_pair(single: Worker, prefill: Worker, decode: Worker) -> bool:
    """Whether a prefill and a decode instance should share a request that `single` could do alone.

    The busier of the two counts: the request waits for both.
    """
    return max(outstanding_tokens(prefill), outstanding_tokens(decode)) < outstanding_tokens(single)


def pick_encoder(
    content_hash: str, candidates: Sequence[Worker], avoid: Collection[str] = ()
) -> tuple[Worker, EncoderAffinity]:
    """Choose the encoder of an item: by rendezvous hashing on the content, so that equal items meet, bounded by load.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): the best-scored encoder within its
    share of all items, by `outstanding_items`. Instances in `avoid` are a last resort. `candidates` must not be empty.
    """
    scores = {worker: rendezvous_score(content_hash, worker.instance_id) for worker in candidates}
    ranked = sorted(candidates, key=scores.__getitem__, reverse=True)
    preferred = [worker for worker in ranked if worker.instance_id not in avoid] or ranked
    total = sum(map(outstanding_items, preferred)) + 1
    bound = max(FREE_ITEMS, math.ceil(LOAD_FACTOR * total / len(preferred)))
    chosen = next((worker for worker in preferred if outstanding_items(worker) < bound), preferred[0])
    if chosen is ranked[0]:
        return chosen, "hit"
    return chosen, "avoided" if preferred[0] is not ranked[0] else "overloaded"


def imbalance(workers: Sequence[Worker]) -> float:
    """Return the load of a role's busiest worker over the mean; 1 for equal loads, or none.

    Items count for encoders, tokens for all others.
    """
    loads = [outstanding_items(one) if one.record.role == "encoder" else outstanding_tokens(one) for one in workers]
    return max(loads) / mean(loads) if any(loads) else 1.0


def outstanding_tokens(worker: Worker) -> int:
    """Return the tokens that a worker may still have to compute.

    The worker's count includes other proxies' requests but may be a heartbeat old; this proxy's count is exact.
    """
    return max(worker.load.tokens, worker.record.outstanding_tokens)


def outstanding_items(worker: Worker) -> int:
    """Return the least number of items at an encoder: its own count of other proxies' work is in requests."""
    return max(worker.load.items, worker.record.outstanding)


def outstanding_requests(worker: Worker) -> int:
    """Return the requests at a worker, by the same two counts."""
    return max(worker.load.requests, worker.record.outstanding)
