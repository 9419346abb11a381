"""Which worker gets what. Pure functions over the workers' loads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import mean
from typing import Final, Literal

from common.hashing import rendezvous_score
from proxy.dispatch.worker import Worker

LOAD_FACTOR: Final = 1.25
"""A worker may hold this much more than the mean before what it has cached goes elsewhere."""
FREE_ITEMS: Final = 4
"""Items an encoder may always hold, and requests a decoder: affinity is worth a short queue."""

Affinity = Literal["hit", "overloaded", "unknown"]
"""Whether a request went where its prompt is cached: it did; that instance had too much to do; none is known to have
it."""

EncoderAffinity = Literal["hit", "overloaded", "avoided"]
"""Whether an item went to the encoder that its content belongs to, which has its output if anybody has: it did; that
one had too much to do; it has another item of the same request."""


def pick_decoder(candidates: Sequence[Worker], cached_at: str | None = None) -> tuple[Worker, Affinity]:
    """Who computes a prompt, or decodes: the instance `cached_at` unless it is overloaded, else the least loaded one.

    Overloaded is who has FREE_ITEMS requests and more outstanding tokens than LOAD_FACTOR times the mean, as with
    encoders. `candidates` must not be empty.
    """
    least = min(candidates, key=_decoder_load)
    home = next((worker for worker in candidates if worker.instance_id == cached_at), None)
    if home is None:
        return least, "unknown"
    share = LOAD_FACTOR * mean(outstanding_tokens(worker) for worker in candidates)
    if home is least or outstanding_requests(home) < FREE_ITEMS or outstanding_tokens(home) <= share:
        return home, "hit"
    return least, "overloaded"


def prefer_pair(single: Worker, prefill: Worker, decode: Worker) -> bool:
    """Whether a prefill and a decode instance should share a request that one instance could do alone.

    The busier of the two counts: the request waits for both.
    """
    return max(outstanding_tokens(prefill), outstanding_tokens(decode)) < outstanding_tokens(single)


def pick_encoder(
    content_hash: str, candidates: Sequence[Worker], avoid: Collection[str] = ()
) -> tuple[Worker, EncoderAffinity]:
    """The encoder of an item: by rendezvous hashing on its content, so that equal items meet, bounded by load.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): the best-scored encoder that is not
    over its share of what all have, by `outstanding_items`. `avoid` are instances to pass over while there is another
    one. `candidates` must not be empty.
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
    """The load of the busiest worker of a role over the mean: 1 where all have the same, or nothing to do.

    Of encoders the items count, of all others the tokens.
    """
    loads = [outstanding_items(one) if one.record.role == "encoder" else outstanding_tokens(one) for one in workers]
    return max(loads) / mean(loads) if any(loads) else 1.0


def outstanding_tokens(worker: Worker) -> int:
    """Tokens that a worker may still have to compute.

    Its own count includes other proxies' requests but is up to a heartbeat old; ours is exact but only ours.
    """
    return max(worker.load.tokens, worker.record.outstanding_tokens)


def outstanding_items(worker: Worker) -> int:
    """Items that an encoder has to encode, at least: of other proxies' work it counts the requests."""
    return max(worker.load.items, worker.record.outstanding)


def outstanding_requests(worker: Worker) -> int:
    """Requests that a worker has, by the same two counts."""
    return max(worker.load.requests, worker.record.outstanding)


def _decoder_load(worker: Worker) -> tuple[int, int, str]:
    return outstanding_tokens(worker), outstanding_requests(worker), worker.instance_id
