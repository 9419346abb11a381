"""The workers of one job: who decodes it, who computes its prompt where that is another one, who encodes its items."""

from __future__ import annotations

import itertools
import math
import time
from typing import Final

from common.errors import TriptychError
from common.messages import Abort, Generate, Inquiry, StopSequence
from common.telemetry import get_logger
from proxy.dispatch.affinity import cache_keys
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.encode_dispatcher import EncodeDispatcher
from proxy.dispatch.jobs import Job
from proxy.dispatch.placement import WHOLE, absent_s, anybody_encodes, missing
from proxy.dispatch.prefill_dispatcher import PrefillDispatcher
from proxy.dispatch.progress import Progress
from proxy.dispatch.prompt_logprobs import RemotePromptLogprobs
from proxy.dispatch.worker import Claim, Worker

log = get_logger()

MAX_MOVES: Final = 3
"""Decoders that one request may outlive."""
INQUIRY_S: Final = 5.0
"""Between two questions to those who should be at a job whether they still are."""
FIRST_LOOK_S: Final = 0.1
"""Between two looks at who is there, while the proxy has only just been started and does not know yet."""


class WorkerAssignment:
    """Puts a job, or what `progress` leaves of it, on workers, and takes it away from them.

    Where nobody can take it at the moment it waits, by `expire`, to be called at `next_deadline_s`.
    """

    def __init__(
        self, job: Job, cluster: DispatchContext, progress: Progress, prompt_logprobs: RemotePromptLogprobs
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._progress = progress
        self._prompt_logprobs = prompt_logprobs
        self._cache_keys = cache_keys(job)
        self.items = EncodeDispatcher(job, cluster)
        self._attempts = itertools.count(1)
        self.prefill = PrefillDispatcher(job, self._cache_keys, cluster, self.items, self._attempts)
        self._claim: Claim | None = None
        self._attempt = 0  # the decoder's
        self._place_at_s = math.inf
        self._ask_at_s = math.inf
        self._moves = 0

    @property
    def decoder(self) -> Worker | None:
        """Who generates the tokens; None while nobody does."""
        return None if self._claim is None else self._claim.worker

    def decodes(self, worker: Worker, attempt: int) -> bool:
        """Whether it is this worker, in this attempt, that generates the tokens: the job may have come back to it."""
        return worker is self.decoder and attempt == self._attempt

    def prefills(self, worker: Worker, attempt: int) -> bool:
        """Whether it is this worker, in this attempt, that computes the prompt."""
        return worker is self.prefill.worker and attempt == self.prefill.attempt

    def __contains__(self, worker: Worker) -> bool:
        """Whether the job has something under way on that worker."""
        return worker in (self.decoder, self.prefill.worker) or self.items.use(worker)

    @property
    def next_deadline_s(self) -> float:
        """When `expire` has something to do (by `time.monotonic`)."""
        return min(self._place_at_s, self._ask_at_s, self.prefill.due_s, self.items.next_deadline_s)

    async def expire(self, now_s: float) -> None:
        """Do what is due, and give up what has been waited for too long. Raises as `place` does."""
        if self._place_at_s <= now_s:
            await self.place()
        if self._ask_at_s <= now_s:
            await self._inquire()
        await self.prefill.expire(now_s)
        await self.items.expire(now_s)

    async def on_joined(self) -> None:
        """There is a new worker: it may be the one that is waited for."""
        if self._place_at_s < math.inf:
            await self.place()
        await self.prefill.on_joined()
        await self.items.on_joined()

    async def place(self) -> None:
        """Put the job on workers, or wait for some to come back.

        Raises TriptychError("unavailable") where there are none and none were there a moment ago.
        """
        cluster, job = self._cluster, self._job
        placement = cluster.placer.choose(cluster.pool, self._cache_keys, media=bool(job.media))
        if placement is None:
            left_s = cluster.patience_s(absent_s(cluster.pool))
            if left_s <= 0:
                raise TriptychError("unavailable", f"no {missing(cluster.pool)} is ready; try again shortly")
            self._place_at_s = time.monotonic() + (left_s if cluster.pool.has_looked else min(left_s, FIRST_LOOK_S))
            return
        decoder, apart = placement.decoder, placement.prefiller is not None
        self._place_at_s, self._ask_at_s = math.inf, time.monotonic() + INQUIRY_S
        self._claim, self._attempt = Claim(decoder, self._size), next(self._attempts)
        self._prompt_logprobs.start(apart=apart)
        resumed = self._progress.resumed(job.enough)
        await decoder.send(
            Generate(
                job.request_id,
                job.prompt_token_ids,
                job.slots,
                job.sampling,
                job.priority,
                resumed,
                prefilled=apart,
                attempt=self._attempt,
            )
        )
        if apart:
            await self.prefill.start(placement, resumed, self._attempt)
        else:
            await self.items.send_all(decoder, self._attempt)

    async def move(self, reason: str, *, pause_s: float = 0.0, decoder_has_it: bool = False) -> None:
        """Take the rest of the job elsewhere, after `pause_s`. Raises as `place` does, and after MAX_MOVES."""
        await self.leave(decoder_has_it=decoder_has_it)
        self._moves += 1
        if self._moves > MAX_MOVES:  # or a request that no decoder survives would take them all down in turn
            raise TriptychError("unavailable", f"{self._moves} decoders were lost with this request; it is given up")
        if self._progress.done:
            return
        log.warning("request moves", request=self._job.request_id, reason=reason)
        self._cluster.metrics.retries.labels(reason).inc()
        if pause_s:
            self._place_at_s = time.monotonic() + pause_s
        else:
            await self.place()

    async def leave(self, *, decoder_has_it: bool) -> None:
        """Take the job away from who decodes it (if that one still has it) and who computes its prompt."""
        decoder = self._release_decoder()
        if decoder is not None and decoder_has_it:
            await decoder.tell(Abort(self._job.request_id))
        await self.prefill.stop()
        self.items.recall()

    async def _inquire(self) -> None:
        """Ask whether the job is still where it was put: if it was lost on the way, nobody else would ever say so."""
        self._ask_at_s = time.monotonic() + INQUIRY_S
        if self.decoder is not None:
            await self.decoder.tell(Inquiry(self._job.request_id, self._attempt))
        await self.prefill.inquire()

    @property
    def stranded(self) -> bool:
        """Whether nobody can encode the inputs where they are needed, but could if the job were elsewhere."""
        return self.items.stranded and anybody_encodes(self._cluster.pool)

    def pairless(self) -> bool:
        """Whether only workers that need no prefill worker could go on: the decoder's are gone."""
        pool = self._cluster.pool
        return not pool.workers("prefill", matching=self.decoder) and bool(pool.workers(*WHOLE))

    async def stop_sequence(self, index: int) -> None:
        """Go no further with one sequence."""
        if self.decoder is not None and not self._job.sampling.uses_beams:
            await self.decoder.tell(StopSequence(self._job.request_id, index))

    async def finish(self) -> None:
        """The job has been answered: release what is counted, stop what runs for nothing."""
        self._release_decoder()
        await self.items.finish()
        await self.prefill.finish_superfluous()

    async def abort(self) -> None:
        """Have everybody forget the job. Does not wait for anything."""
        for worker in self.items.used:
            await worker.tell(Abort(self._job.request_id))
        await self.leave(decoder_has_it=True)

    def _release_decoder(self) -> Worker | None:
        decoder, self._ask_at_s = self.decoder, math.inf
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        return decoder

    @property
    def _size(self) -> int:
        sampling = self._job.sampling
        return len(self._job.prompt_token_ids) + sampling.max_tokens * sampling.num_sequences
