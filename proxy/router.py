"""Which worker gets what. Pure functions over the workers' loads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from common.hashing import rendezvous_score
from proxy.worker import Worker

LOAD_FACTOR: Final = 1.25
"""An encoder may hold this much more than the mean before its items go elsewhere."""
FREE_ITEMS: Final = 4
"""Items an encoder may always hold: affinity is worth a short queue."""


def pick_decoder(candidates: Sequence[Worker]) -> Worker | None:
    """The decoder with the fewest outstanding requests, then tokens.

    A worker's own count includes other proxies' requests but is up to a heartbeat old; ours is exact but only ours.
    """
    return min(candidates, key=_decoder_load, default=None)


def pick_encoder(content_hash: str, candidates: Sequence[Worker], avoid: Collection[str] = ()) -> Worker | None:
    """The encoder of an item: by rendezvous hashing on its content, so that equal items meet, bounded by load.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): the best-scored encoder that is not
    over its share. `avoid` are instances to pass over while there is another one.
    """
    if not candidates:
        return None
    preferred = [worker for worker in candidates if worker.instance_id not in avoid] or list(candidates)
    ranked = sorted(preferred, key=lambda worker: rendezvous_score(content_hash, worker.instance_id), reverse=True)
    total = sum(worker.load.requests for worker in preferred) + 1
    bound = max(FREE_ITEMS, math.ceil(LOAD_FACTOR * total / len(preferred)))
    return next((worker for worker in ranked if worker.load.requests < bound), ranked[0])


def _decoder_load(worker: Worker) -> tuple[int, int, str]:
    return max(worker.load.requests, worker.record.outstanding), worker.load.size, worker.instance_id
