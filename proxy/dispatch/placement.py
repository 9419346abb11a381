"""Placement of a job: on one instance for prefill and decode, or on a pair; by load where both exist."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from common.messages import Role
from proxy.dispatch.affinity import AffinityMap
from proxy.dispatch.router import Affinity, pick_decoder, prefer_pair
from proxy.dispatch.worker import Worker
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics

WHOLE: Final[tuple[Role, ...]] = ("prefill_decode", "encode_prefill_decode")
"""Roles that answer a request without another instance, except encoders."""


@dataclass(frozen=True)
class Placement:
    """The workers of a job. `decoder` generates; `prefiller` computes the prompt if apart."""

    decoder: Worker
    prefiller: Worker | None = None


@dataclass(frozen=True)
class _Option:
    """A placement, and its cache affinity: of the prompt's computation and, for a pair, of decoding."""

    placement: Placement
    affinity: Affinity
    decode_affinity: Affinity | None = None


class Placer:
    """Chooses workers by outstanding tokens and by cache affinity to earlier prompts.

    One per proxy, for all jobs. Two maps remember where prompts were computed and where they were decoded: both workers
    keep the blocks.
    """

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._computed = AffinityMap()
        self._decoded = AffinityMap()

    def choose(self, pool: WorkerPool, keys: list[bytes], *, media: bool) -> Placement | None:
        """Return the workers for a job with these cache keys; None where no worker can run the job now.

        With `media`, workers whose inputs can be encoded come first: without encoders, workers that encode themselves.
        """
        options = self._options(pool, keys, media=media)
        if media and not options:
            options = self._options(pool, keys, media=False)
        if not options:
            return None
        option = options[0] if len(options) == 1 else _better(*options)
        placement = option.placement
        self._metrics.affinity.labels(option.affinity).inc()
        if option.decode_affinity is not None:
            self._metrics.decode_affinity.labels(option.decode_affinity).inc()
        self._computed.remember(keys, (placement.prefiller or placement.decoder).instance_id)
        if placement.prefiller is not None:
            self._decoded.remember(keys, placement.decoder.instance_id)
        return placement

    def choose_prefiller(
        self, pool: WorkerPool, keys: list[bytes], decoder: Worker, failed_on: set[str], *, media: bool
    ) -> Worker | None:
        """Return another prefill worker for a decoder that stays; instances in `failed_on` are a last resort.

        `media` is as in `choose`.
        """
        candidates = pool.workers("prefill", matching=decoder)
        if media:
            candidates = [worker for worker in candidates if encodes_for(pool, worker)] or candidates
        fresh = [worker for worker in candidates if worker.instance_id not in failed_on] or candidates
        if not fresh:
            return None
        worker, affinity = self._pick(self._computed, fresh, keys)
        self._metrics.affinity.labels(affinity).inc()
        self._computed.remember(keys, worker.instance_id)
        return worker

    def _options(self, pool: WorkerPool, keys: list[bytes], *, media: bool) -> list[_Option]:
        """Return the best single worker and the best pair, as far as available."""
        options: list[_Option] = []
        if whole := [worker for worker in pool.workers(*WHOLE) if not media or encodes_for(pool, worker)]:
            worker, affinity = self._pick(self._computed, whole, keys)
            options.append(_Option(Placement(worker), affinity))
        pairs: dict[Worker, list[Worker]] = {}  # the prefill workers of each decoder
        for decoder in pool.workers("decode"):
            matching = pool.workers("prefill", matching=decoder)
            if prefillers := [worker for worker in matching if not media or encodes_for(pool, worker)]:
                pairs[decoder] = prefillers
        if pairs:
            decoder, decode_affinity = self._pick(self._decoded, [*pairs], keys)
            prefiller, affinity = self._pick(self._computed, pairs[decoder], keys)
            options.append(_Option(Placement(decoder, prefiller), affinity, decode_affinity))
        return options

    def _pick(self, map_: AffinityMap, candidates: list[Worker], keys: list[bytes]) -> tuple[Worker, Affinity]:
        return pick_decoder(candidates, map_.find(keys, (worker.instance_id for worker in candidates)))


def encodes_for(pool: WorkerPool, reader: Worker) -> bool:
    """Whether the inputs of prompts that `reader` computes can be encoded."""
    return reader.record.encodes or bool(pool.workers("encoder", matching=reader))


def prompt_readers(pool: WorkerPool) -> list[Worker]:
    """Return all workers that may compute the prompts of new jobs."""
    prefillers = [worker for worker in pool.workers("prefill") if pool.workers("decode", matching=worker)]
    return [*pool.workers(*WHOLE), *prefillers]


def any_encodes(pool: WorkerPool) -> bool:
    """Whether the inputs of any worker's prompts can be encoded."""
    return any(encodes_for(pool, reader) for reader in prompt_readers(pool))


def missing(pool: WorkerPool) -> str | None:
    """Return in words the missing worker without which no job can be placed; None where jobs can be placed."""
    if prompt_readers(pool):
        return None
    match bool(pool.workers("prefill")), bool(pool.workers("decode")):
        case True, True:
            return "prefill worker that matches a decode worker"
        case True, False:
            return "decode worker"
        case False, True:
            return "prefill worker"
    return "decoder worker"


def absent_s(pool: WorkerPool) -> float:
    """Return for how long no job could be placed; infinity if never, or where the present workers do not match."""
    since_s = min(pool.absent_s(*WHOLE), max(pool.absent_s("prefill"), pool.absent_s("decode")))
    return since_s or math.inf


def _better(whole: _Option, pair: _Option) -> _Option:
    """Return the option with the prompt cached, or the less loaded option."""
    if (whole.affinity == "hit") != (pair.affinity == "hit"):
        return whole if whole.affinity == "hit" else pair
    assert pair.placement.prefiller is not None
    return pair if prefer_pair(whole.placement.decoder, pair.placement.prefiller, pair.placement.decoder) else whole
