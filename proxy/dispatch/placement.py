"""Which instances run a job: one that prefills and decodes, or one of each. Where both kinds are there, by load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common.messages import Role
from proxy.dispatch.affinity import AffinityMap
from proxy.dispatch.router import Affinity, pick_decoder, prefer_pair
from proxy.dispatch.worker import Worker
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics

WHOLE: Final[tuple[Role, ...]] = ("prefill_decode", "encode_prefill_decode")
"""Roles that need no other instance to answer a request, but perhaps encoders."""


@dataclass(frozen=True)
class Placement:
    """Who runs a job. `decoder` generates; `prefiller` has computed the prompt for it, where that is another one."""

    decoder: Worker
    prefiller: Worker | None = None

    @property
    def reader(self) -> Worker:
        """Who computes the prompt, and so needs the inputs."""
        return self.prefiller or self.decoder


@dataclass(frozen=True)
class _Option:
    """A placement, and whether it goes where the prompt is cached: where it is computed, and, of a pair, decoded."""

    placement: Placement
    affinity: Affinity
    decode_affinity: Affinity | None = None


class Placer:
    """Chooses by outstanding tokens, and by what an instance probably has cached: it remembers where what was sent.

    One per proxy, for all its jobs. Prompts are remembered where they are computed, and apart from that where they are
    decoded: both keep the blocks.
    """

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._computed = AffinityMap()
        self._decoded = AffinityMap()

    def choose(self, pool: WorkerPool, keys: list[bytes], *, media: bool) -> Placement | None:
        """Who runs a job with these cache keys; None where nobody can at the moment.

        With `media`, those come first whose inputs somebody can encode: where no encoder is left, those that do it.
        """
        able = (lambda reader: encodes_for(pool, reader)) if media else _anybody
        options = self._options(pool, keys, able) or self._options(pool, keys, _anybody)
        if not options:
            return None
        option = options[0] if len(options) == 1 else _better(*options)
        placement = option.placement
        self._metrics.affinity.labels(option.affinity).inc()
        if option.decode_affinity is not None:
            self._metrics.decode_affinity.labels(option.decode_affinity).inc()
        self._computed.remember(keys, placement.reader.instance_id)
        if placement.prefiller is not None:
            self._decoded.remember(keys, placement.decoder.instance_id)
        return placement

    def choose_prefiller(
        self, pool: WorkerPool, keys: list[bytes], decoder: Worker, failed_on: set[str], *, media: bool
    ) -> Worker | None:
        """Another one to compute the prompt for a decoder that stays; one of `failed_on` only if there is no other.

        With `media`, as in `choose`.
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

    def _options(self, pool: WorkerPool, keys: list[bytes], able: Callable[[Worker], bool]) -> list[_Option]:
        """The best of each kind, of those that are `able` to compute the prompt."""
        options: list[_Option] = []
        if whole := [worker for worker in pool.workers(*WHOLE) if able(worker)]:
            worker, affinity = self._pick(self._computed, whole, keys)
            options.append(_Option(Placement(worker), affinity))
        if pair := self._pick_pair(pool, keys, able):
            options.append(pair)
        return options

    def _pick_pair(self, pool: WorkerPool, keys: list[bytes], able: Callable[[Worker], bool]) -> _Option | None:
        def prefillers(decoder: Worker) -> list[Worker]:
            return [worker for worker in pool.workers("prefill", matching=decoder) if able(worker)]

        decoders = [worker for worker in pool.workers("decode") if prefillers(worker)]
        if not decoders:
            return None
        decoder, decode_affinity = self._pick(self._decoded, decoders, keys)
        prefiller, affinity = self._pick(self._computed, prefillers(decoder), keys)
        return _Option(Placement(decoder, prefiller), affinity, decode_affinity)

    def _pick(self, map_: AffinityMap, candidates: list[Worker], keys: list[bytes]) -> tuple[Worker, Affinity]:
        return pick_decoder(candidates, map_.find(keys, (worker.instance_id for worker in candidates)))


def encodes_for(pool: WorkerPool, reader: Worker) -> bool:
    """Whether somebody can encode the inputs of the prompts that `reader` computes."""
    return reader.record.encodes or bool(pool.workers("encoder", matching=reader))


def prompt_readers(pool: WorkerPool) -> list[Worker]:
    """Everybody to whom the prompts and inputs of new jobs may go."""
    prefillers = [worker for worker in pool.workers("prefill") if pool.workers("decode", matching=worker)]
    return [*pool.workers(*WHOLE), *prefillers]


def any_encodes(pool: WorkerPool) -> bool:
    """Whether there is somebody whose prompts' inputs can be encoded."""
    return any(encodes_for(pool, reader) for reader in prompt_readers(pool))


def missing(pool: WorkerPool) -> str | None:
    """What there must be for jobs to be placed, and is not, in words; None if nothing."""
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
    """For how long no job could be placed, where none can be; infinity if never, or where those there are do not go
    together."""
    since_s = min(pool.absent_s(*WHOLE), max(pool.absent_s("prefill"), pool.absent_s("decode")))
    return since_s or math.inf


def _better(whole: _Option, pair: _Option) -> _Option:
    """The one that has the prompt cached, else the one with less to do."""
    if (whole.affinity == "hit") != (pair.affinity == "hit"):
        return whole if whole.affinity == "hit" else pair
    assert pair.placement.prefiller is not None
    return pair if prefer_pair(whole.placement.decoder, pair.placement.prefiller, pair.placement.decoder) else whole


def _anybody(_: Worker) -> bool:
    return True
