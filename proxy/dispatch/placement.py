"""Choice of workers by load and cache affinity.

A prompt goes to one instance for prefill and decode, or to a pair, by load where both exist. Cache affinity prefers the
instance that probably has the beginning of a prompt, or the media, in its caches.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final, Literal

from common.messages import Placed, Role
from proxy.dispatch.worker import Load, Worker
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics

WHOLE: Final[tuple[Role, ...]] = ("prefill_decode", "encode_prefill_decode")
"""Roles that answer a request without another instance, except encoders."""
MAX_KEYS: Final = 20_000
"""Remembered keys: a million tokens, in 0.3 MiB."""
WAYS: Final = 8
LOAD_FACTOR: Final = 1.25
"""A worker may have this much more than the mean load before cached prompts go elsewhere."""
FREE_ITEMS: Final = 4
"""Items an encoder may always have, and requests a decoder: affinity is worth a short queue."""

Affinity = Literal["hit", "overloaded", "unknown"]
"""Placement of a prompt: on the instance that has it cached; elsewhere due to load; no such instance is known."""

EncoderAffinity = Literal["hit", "overloaded", "avoided"]
"""Placement of an item: on the home encoder of its content, where a cached output would be; elsewhere due to load;
elsewhere because the home encoder has another item of the same request."""


class AffinityMap:
    """The last instance of each key, in a table of fixed size like a processor's cache.

    A key has WAYS possible slots; of the keys that share those, the least recently used is evicted first.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._num_ways = min(WAYS, max_keys)
        self._num_sets = max_keys // self._num_ways
        size = self._num_sets * self._num_ways
        self._hashes = array("q", bytes(8 * size))
        self._instances = [""] * size  # of the hashes beside; "" without a key

    def remember(self, keys: Iterable[bytes], instance_id: str) -> None:
        """Record the instance as the last one of these keys."""
        for key in keys:
            first, slot = self._look_up(key)
            last = first + self._num_ways - 1 if slot is None else slot
            self._hashes[first + 1 : last + 1] = self._hashes[first:last]
            self._instances[first + 1 : last + 1] = self._instances[first:last]
            self._hashes[first], self._instances[first] = hash(key), instance_id

    def find(self, keys: Sequence[bytes], candidates: Sequence[Worker]) -> Worker | None:
        """Return the candidate with the first known key; None without any."""
        slots = (slot for key in keys if (slot := self._look_up(key)[1]) is not None)
        names = dict.fromkeys(self._instances[slot] for slot in slots)  # few: looking for each is less than a table
        return next((one for name in names for one in candidates if one.instance_id == name), None)

    def _look_up(self, key: bytes) -> tuple[int, int | None]:
        """Return the first of a key's slots, with the latest key, and the key's own slot if in the table."""
        wanted = hash(key)
        first = wanted % self._num_sets * self._num_ways
        slots = self._hashes[first : first + self._num_ways]
        return first, first + slots.index(wanted) if wanted in slots else None


@dataclass(frozen=True)
class Placement:
    """The workers of a job. `decoder` generates; `prefiller` computes the prompt if apart.

    The cache affinities are those of the prompt's computation and, for a pair, of decoding.
    """

    decoder: Worker
    affinity: Affinity
    prefiller: Worker | None = None
    decode_affinity: Affinity | None = None


class Placer:
    """Chooses workers by outstanding tokens and by cache affinity to earlier prompts, this proxy's and all others'.

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
        placement = options[0] if len(options) == 1 else better(*options)
        self._metrics.affinity.labels(placement.affinity).inc()
        own, decoder = pool.own.instance_id, placement.decoder.instance_id
        if placement.prefiller is None:
            self.learn(Placed(own, keys, decoder), pool)
        else:
            self._metrics.decode_affinity.labels(placement.decode_affinity).inc()
            self.learn(Placed(own, keys, placement.prefiller.instance_id, decoder), pool)
        return placement

    def learn(self, placed: Placed, pool: WorkerPool | None = None) -> None:
        """Remember where a prompt was placed: by another proxy or, with a `pool`, here, and tell the others."""
        self._computed.remember(placed.keys, placed.computed)
        if placed.decoded:
            self._decoded.remember(placed.keys, placed.decoded)
        if pool is not None and pool.num_proxies > 1 and placed.keys:
            pool.tell(placed)

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
        worker, affinity = pick_decoder(fresh, self._computed.find(keys, fresh))
        self._metrics.affinity.labels(affinity).inc()
        self.learn(Placed(pool.own.instance_id, keys, worker.instance_id), pool)
        return worker

    def _options(self, pool: WorkerPool, keys: list[bytes], *, media: bool) -> list[Placement]:
        """Return the best single worker and the best pair, as far as available."""
        options: list[Placement] = []
        if whole := [worker for worker in pool.workers(*WHOLE) if not media or encodes_for(pool, worker)]:
            worker, affinity = pick_decoder(whole, self._computed.find(keys, whole))
            options.append(Placement(worker, affinity))
        one_of = {decoder.record.dtype: decoder for decoder in pool.workers("decode")}
        prefillers = {
            dtype: [one for one in pool.workers("prefill", matching=decoder) if not media or encodes_for(pool, one)]
            for dtype, decoder in one_of.items()
        }
        if decoders := [decoder for decoder in pool.workers("decode") if prefillers[decoder.record.dtype]]:
            decoder, decode_affinity = pick_decoder(decoders, self._decoded.find(keys, decoders))
            fitting = prefillers[decoder.record.dtype]
            prefiller, affinity = pick_decoder(fitting, self._computed.find(keys, fitting))
            options.append(Placement(decoder, affinity, prefiller, decode_affinity))
        return options


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


def better(whole: Placement, pair: Placement) -> Placement:
    """Return the placement with the prompt cached, or the less loaded one: of a pair the busier worker counts."""
    if (whole.affinity == "hit") != (pair.affinity == "hit"):
        return whole if whole.affinity == "hit" else pair
    assert pair.prefiller is not None
    busier = max(outstanding(pair.prefiller).tokens, outstanding(pair.decoder).tokens)
    return pair if busier < outstanding(whole.decoder).tokens else whole


def pick_decoder(candidates: Sequence[Worker], home: Worker | None = None) -> tuple[Worker, Affinity]:
    """Choose a worker for a prompt: `home`, which has the prompt cached, unless overloaded; else the least loaded.

    A worker with FREE_ITEMS requests and more outstanding tokens than LOAD_FACTOR times the mean is overloaded.
    `candidates` must not be empty.
    """
    loads = {worker: outstanding(worker) for worker in candidates}
    least = min(candidates, key=lambda one: (loads[one].tokens, loads[one].requests, one.instance_id))
    if home is None:
        return least, "unknown"
    share = LOAD_FACTOR * mean(load.tokens for load in loads.values())
    if home is least or loads[home].requests < FREE_ITEMS or loads[home].tokens <= share:
        return home, "hit"
    return least, "overloaded"


def pick_encoder(
    content_hash: str, candidates: Sequence[Worker], avoid: Collection[str] = ()
) -> tuple[Worker, EncoderAffinity]:
    """Choose the encoder of an item: by rendezvous hashing on the content, so that equal items meet, bounded by load.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): the best-scored encoder within its
    share of all items. Instances in `avoid` are a last resort. `candidates` must not be empty.
    """
    keys = {worker: f"{content_hash}\0{worker.instance_id}".encode() for worker in candidates}
    ranked = sorted(candidates, key=lambda one: hashlib.blake2b(keys[one], digest_size=8).digest(), reverse=True)
    preferred = [worker for worker in ranked if worker.instance_id not in avoid] or ranked
    num_items = {worker: outstanding(worker).items for worker in preferred}
    bound = max(FREE_ITEMS, math.ceil(LOAD_FACTOR * (sum(num_items.values()) + 1) / len(preferred)))
    chosen = next((worker for worker in preferred if num_items[worker] < bound), preferred[0])
    if chosen is ranked[0]:
        return chosen, "hit"
    return chosen, "avoided" if preferred[0] is not ranked[0] else "overloaded"


def imbalance(workers: Sequence[Worker]) -> float:
    """Return the load (items of encoders, else tokens) of a role's busiest worker over the mean; 1 without load."""
    loads = [outstanding(one).items if one.record.role == "encoder" else outstanding(one).tokens for one in workers]
    return max(loads) / mean(loads) if any(loads) else 1.0


def outstanding(worker: Worker) -> Load:
    """Return the work that a worker may still have to do.

    The worker's own count includes other proxies' requests but may be a heartbeat old; this proxy's count is exact.
    Of items the result is the least number: the worker counts other proxies' items in requests.
    """
    own, record = worker.load, worker.record
    return Load(
        requests=max(own.requests, record.outstanding),
        tokens=max(own.tokens, record.outstanding_tokens),
        items=max(own.items, record.outstanding),
    )
