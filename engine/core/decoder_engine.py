"""The decoder's engine: requests, offers and tensors in, events out; each call of `step` is a forward pass.

    add_request / offer / deliver / abort  ->  input_receiver and scheduler  ->  runner  ->  events

One thread drives it. It knows no network: `LLM` drives it in one process, a worker's engine thread in a cluster.
"""

from __future__ import annotations

import torch

from common.config import EngineConfig
from common.errors import TriptychError
from common.messages import KV_INPUT_ID, Failed, Generate, KvOffer, Offer
from common.model_info import ModelInfo
from common.telemetry import get_logger
from common.text.prompts import NOT_COMPUTED
from engine.attention.metadata import cross_plans_reused
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool, IntegrityError
from engine.cache.encoder_cache import EncoderCacheManager
from engine.core.decoding import Decoding
from engine.core.encoder_engine import encoder_computations
from engine.core.output_processor import OutputProcessor
from engine.core.request_factory import RequestFactory
from engine.core.step_loop import StepLoop
from engine.device.pending_tensor import PendingTensor
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.kv_exporter import KvExporter
from engine.handoff.kv_receiver import KvReceiver
from engine.handoff.offer_check import KvOfferCheck, KvPart
from engine.runner.profile import load_runner
from engine.sampling import device_draw
from engine.sampling.sampler import Sampler
from engine.scheduler.capacity import CacheLookup
from engine.scheduler.decoder import DecoderScheduler
from engine.state.engine_state import EngineState
from engine.state.events import Event
from engine.state.spec import Table

log = get_logger()

LEASE_S = 30.0


class DecoderEngine:
    """Prefill and decode of a model on one device. Loads decoder weights only.

    Raises TriptychError where the model or the configuration cannot be served. After that, errors of a request come
    as `Failed` events, and its neighbours do not notice.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        instance: str = "engine",
        lease_s: float = LEASE_S,
        beside_bytes: int = 0,
    ) -> None:
        """`beside_bytes` of the memory budget belong to an encoder in the same process."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.info, self.config = info, config
        rules = info.generation or info.text_config
        if unread := [name for name in NOT_COMPUTED if rules.get(name) not in (None, 0, 1)]:
            log.warning("rules of generation_config.json are not computed", rules=unread)
        self.runner = load_runner(info, config, beside_bytes)
        self.cache = EncoderCacheManager(self.runner.memory.encoder_cache)
        host_pool = BlockPool(self.runner.num_host_blocks + 1)
        self.blocks = BlockManager(BlockPool(self.runner.num_blocks), config.block_size, host_pool)
        self.cache_lookup = CacheLookup(self.blocks, enabled=config.prefix_caching)
        offer_check = KvOfferCheck.of(info, self.runner.spec, self.runner.max_model_len, self.runner.dtype)
        self.state = EngineState()
        self.scheduler = DecoderScheduler(
            self.blocks,
            self.cache_lookup,
            self.runner.buffers,
            config,
            self.runner.max_model_len,
            whole_inputs=bool(self.runner.spec.whole_input_tokens),
        )
        self.input_receiver = InputReceiver(self.state, self.cache, offer_check.inputs, self.cache_lookup, lease_s)
        self.sampler = Sampler(info, self.runner.spec.vocab_size)
        device_draw.prepare(self.runner.device)
        self.kv_exporter = KvExporter(self.state, self.scheduler, offer_check, self.runner)
        self.kv_receiver = KvReceiver(
            self.state, self.scheduler, self.input_receiver, offer_check, self.runner, lease_s
        )
        self.decoding = Decoding(self.runner, self.scheduler, self.sampler, info.eos_token_ids)
        self.output = OutputProcessor(info, self.scheduler, self.runner.max_model_len)
        limits = self.runner.max_model_len, min(config.max_num_seqs, config.max_num_batched_tokens)
        self._factory = RequestFactory(info, self.runner.spec, *limits, self.sampler, instance)
        self.loop = StepLoop(
            self.state,
            self.runner,
            self.scheduler,
            self.input_receiver,
            self.kv_receiver,
            self.kv_exporter,
            self.decoding,
            self.output,
            ahead=self.runner.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling,
        )
        self.counters = {"requests": 0}

    # --- in

    def add_request(self, message: Generate) -> None:
        """Accept a request. Errors come as a Failed event; a known id is ignored.

        With `prefill_for` its keys and values are computed for another engine, up to the last token but one; it ends
        by `end_prefill`. With `prefilled` they come from another engine, by `offer` and `deliver_kv`.
        `attempt` comes back in the request's events: those of an aborted request may be read when its id is in use
        again.
        """
        request_id = message.request_id
        if request_id in self.state.requests:
            return
        self.state.has_changed = True
        self.counters["requests"] += 1
        try:
            if len(self.state.requests) >= self.config.max_waiting + self.config.max_num_seqs:
                what = f"{len(self.state.requests)} requests are waiting or running"
                raise TriptychError("overloaded", f"{what}: try again later")
            request = self._factory.create(message, self.counters["requests"])
        except TriptychError as error:
            self._forget(request_id, message.attempt)
            self.loop.counters["requests_failed"] += 1
            self.state.emit(Failed(request_id, error.info, message.attempt))
            return
        request.recorder.start("queue")
        self.state.requests[request_id] = request
        if request.prefilled:
            self.kv_receiver.add_request(request)
        else:
            if request.next_missing_input is not None:
                request.recorder.start("inputs")
            if request.prefill_only:
                self.kv_exporter.add_request(request)
            self.scheduler.add(request)
        self.input_receiver.add_request(request)
        self._fail_what_never_fits(request_id)

    def abort(self, request_id: str) -> None:
        """Discard a request and free all memory. Unknown ids are remembered as ended."""
        self.state.has_changed = True
        request = self.state.requests.get(request_id)
        if request is None:
            self._forget(request_id, None)
        else:
            self.loop.end(request)

    def _forget(self, request_id: str, attempt: int | None) -> None:
        """Offers for this request in this attempt, early or late, are cancelled; None as in `EarlyOffers.forget`."""
        self.state.emit(*self.input_receiver.early.forget(request_id, attempt))
        self.kv_receiver.end_request(request_id, attempt)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """Stop a sequence of a request (a stop string); with the last sequence the request ends, silently."""
        request = self.state.requests.get(request_id)
        sequence = next((one for one in request.sequences if one.index == index), None) if request else None
        if request is None or sequence is None or request.sampling.uses_beams:
            return
        if len(request.sequences) == 1:
            self.abort(request_id)
            return
        self.state.has_changed = True
        if request.awaits_kv:
            self.kv_receiver.pass_on(request, sequence)
        self.scheduler.remove_sequence(sequence)
        request.sequences.remove(sequence)
        self.input_receiver.update(self.scheduler.pop_changed())

    def offer(self, offer: Offer | KvOffer) -> None:
        """An encoder offers an input, or another engine keys and values. The answer is an event: granted, cached,
        refused or cancelled, of KV with input id KV_INPUT_ID.

        The offer is for the request that was, or will be, added with its `request_attempt`. The same offer of KV again,
        while they are on their way, is a sign of life that prolongs the lease.
        """
        self.state.has_changed = True
        if isinstance(offer, KvOffer):
            self.kv_receiver.offer(offer)
        else:
            self.input_receiver.offer(offer)
        self._fail_what_never_fits(offer.request_id)

    def withdraw(self, request_id: str, input_id: int, attempt: int) -> None:
        """Release the memory of exactly this attempt, whose sender gives up an input, or KV with KV_INPUT_ID. Unknown
        offers are fine: lost, stored or replaced meanwhile."""
        self.state.has_changed = True
        if input_id == KV_INPUT_ID:
            self.kv_receiver.withdraw(request_id, attempt)
        else:
            self.input_receiver.withdraw(request_id, input_id, attempt)

    def deliver(self, request_id: str, input_id: int, attempt: int, tensor: torch.Tensor) -> None:
        """A granted tensor has come: [num_encoder_tokens, hidden_size]."""
        self.state.has_changed = True
        self.input_receiver.deliver(request_id, input_id, attempt, tensor)
        request = self.state.requests.get(request_id)
        if request is not None and request.next_missing_input is None:
            request.recorder.end("inputs")

    # --- keys and values, from and to another engine

    def export_kv(self, request_id: str, table: Table, first: int, last: int) -> PendingTensor | None:
        """Return KV of a prefill's tokens `first` to `last` (not included), from the self or cross table: [last -
        first, layers, 2, num_kv_heads, head_dim] on the engine's device, contiguous.

        None where they are not there at the moment: not computed yet, or given up for a while (preempted).
        """
        return self.kv_exporter.export(request_id, table, first, last)

    def grant_kv(self, request_id: str) -> None:
        """Put a granted prefill before others, because the receiver has reserved memory."""
        self.state.has_changed = True
        self.kv_exporter.grant(request_id)

    def end_prefill(self, request_id: str) -> None:
        """End a prefill. A Prefilled event follows, at once, or after the requested prompt log-probabilities are
        complete."""
        self.state.has_changed = True
        self.loop.end(*self.kv_exporter.end(request_id))

    def deliver_kv(self, request_id: str, attempt: int, part: KvPart) -> None:
        """Write a part of granted KV. The bytes are copied before the return."""
        self.state.has_changed = True
        self.kv_receiver.deliver(request_id, attempt, part)

    # --- one step

    def has_work(self) -> bool:
        """Return True if `step` has work now."""
        return self.state.has_changed or bool(self.state.outbox or self.loop.in_flight) or self.scheduler.has_work()

    def next_deadline_s(self) -> float | None:
        """Return the time of the next due `step` (by `time.monotonic`); None without a deadline."""
        return min(self.input_receiver.deadlines_s() + self.kv_receiver.deadlines_s(), default=None)

    def answer(self) -> list[Event]:
        """Return events known without a forward pass: grants, receipts, ends of leases. Encoders wait for these."""
        self.loop.settle_inputs()
        return self.state.pop_output()

    def step(self) -> list[Event]:
        """Expire, grant, schedule, launch one forward pass, and return new events."""
        self.state.has_changed = False
        again = self.loop.step()
        self.state.has_changed = self.state.has_changed or again
        return self.state.pop_output()

    def _fail_what_never_fits(self, request_id: str) -> None:
        request = self.state.requests.get(request_id)
        error = None if request is None else self.scheduler.capacity.never_fits(request)
        if request is not None and error is not None:
            self.loop.fail(request, error)

    # --- how it is doing

    def is_empty(self) -> bool:
        """True if no request, reservation, reference or block is held."""
        idle = self.input_receiver.is_empty() and self.kv_receiver.is_empty() and self.blocks.num_used == 0
        return not self.state.requests and idle

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, cache entries and slots add up."""
        self.blocks.check_integrity()
        self.cache.check_integrity()
        self.kv_receiver.check_integrity()
        everyone = (sequence for request in self.state.requests.values() for sequence in request.sequences)
        held = sum(1 for sequence in everyone if sequence.slot_index >= 0)
        free = len(self.runner.buffers.free_slots)
        if held + free != self.config.max_num_seqs:
            raise IntegrityError(f"{held} slots held, {free} free")

    def stats(self) -> dict[str, float]:
        """Return gauges and counters of this moment; counters end in `_total`."""
        return self._gauges() | {f"{name}_total": float(value) for name, value in self._counts().items()}

    def _gauges(self) -> dict[str, float]:
        """Return values that rise and fall."""
        runner, scheduler, blocks, cache = self.runner, self.scheduler, self.blocks, self.cache
        return {
            "last_step_tokens": self.loop.last_step_tokens,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(self.state.requests) - len(scheduler.running),
            "prefill_limit_tokens": scheduler.pace.last_limit if scheduler.pace is not None else 0,
            "kv_blocks_usable": blocks.pool.num_usable,
            "kv_blocks_free": blocks.num_free,
            "kv_blocks_used": blocks.num_used,
            "kv_blocks_cached": blocks.num_cached,
            "kv_host_blocks_free": blocks.host.pool.num_free,
            "kv_host_blocks_used": blocks.host.pool.num_used,
            "kv_block_bytes": runner.block_bytes,
            "encoder_cache_bytes_capacity": cache.capacity_bytes,
            "encoder_cache_bytes_used": cache.used_bytes,
            "encoder_cache_bytes_peak": cache.peak_bytes,
            "encoder_cache_references": cache.num_references,
            "inputs_pending": len(self.input_receiver.pending),
            "inputs_granted": len(self.input_receiver.granted),
            "kv_offers_pending": len(self.kv_receiver.pending),
            "early_offers": len(self.input_receiver.early) + len(self.kv_receiver.early),
            "kv_reserved_requests": len(self.kv_receiver.reserved),
            "steps_recorded": len(runner.graphs.sizes) if runner.graphs is not None else 0,
            "weight_bytes": runner.weight_bytes,
            "attention_fallback": int(runner.backend.is_fallback),
            "layers_fallback": int(runner.layers_are_fallback),
            "adapters_loaded": 0 if runner.adapters is None else len(runner.adapters.loaded),
            "encoder_computations": encoder_computations.value,
            **runner.memory.stats(),
        }

    def _counts(self) -> dict[str, int]:
        """Return values that only grow: the counters of the parts, and more."""
        runner, early = self.runner, (self.input_receiver.early, self.kv_receiver.early)
        senders = self.input_receiver, self.kv_receiver, self.kv_exporter
        parts = (self, self.loop, self.output, *senders, self.scheduler, self.blocks, self.cache)
        counts = {name: value for part in parts for name, value in part.counters.items()}
        counts |= {} if runner.adapters is None else runner.adapters.counters
        return counts | {
            "steps_replayed": 0 if runner.graphs is None else runner.graphs.num_replays,
            "cross_plans_reused": cross_plans_reused.value,
            "early_offers_expired": sum(offers.num_expired for offers in early),
            "early_offers_evicted": sum(offers.num_evicted for offers in early),
        }
