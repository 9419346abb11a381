"""The encoder worker's engine: granted items in, encoder outputs out, in batches across requests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import torch

from common.config import EngineConfig
from common.errors import ErrorInfo
from common.model_info import ModelInfo
from common.telemetry import get_logger
from engine.core.encoder_batches import BatchRunner, LaunchedBatch
from engine.core.encoder_profile import measure_batch
from engine.device.choice import choose_device, choose_dtype, use_kernels
from engine.device.counters import encoder_computations
from engine.device.memory import MemoryReport, check_encoder_budget, memory_budget
from engine.models.registry import load_encoder
from engine.processors import ProcessedInput
from engine.scheduler.encoder import EncoderKey, EncoderScheduler

log = get_logger()

DEFAULT_BATCH_BYTES: Final = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}
"""A CPU gains nothing from large batches, and whoever waits for the first output of one waits for the last."""
OUTGOING_BYTES: Final = {"cpu": 0, "cuda": 256 * 2**20}
"""Of the device, for outputs that have not been taken yet: whoever drives this engine keeps no more of them there."""


@dataclass(frozen=True)
class EncoderResult:
    """One item's output [num_encoder_tokens, hidden_size] on the engine's device, or why there is none.

    `start_s` and `end_s` (Unix time) are those of its batch.
    """

    key: EncoderKey
    tensor: torch.Tensor | None
    error: ErrorInfo | None
    start_s: float
    end_s: float


class EncoderEngine:
    """Runs the encoder of one model. Single-threaded; loads encoder weights only.

    Raises TriptychError("invalid_request") for a text model or a device that there is not, CheckpointError where the
    weights do not fit the model.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        instance: str = "engine",
        output_cache_bytes: int = 0,
        memory_share: float = 1.0,
    ) -> None:
        """`output_cache_bytes` of its memory are left to whoever drives this engine, for outputs that are kept.

        `memory_share` is its part of what this process may take; the rest is for a decoder beside it.
        """
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device, info)
        self.encoder, self.load_report = load_encoder(info, self.device, self.dtype, config.load_format)
        self.attention_is_fallback = not use_kernels(self.encoder, self.device, self.dtype, config.attention_backend)
        self._log = log.bind(engine=instance)
        batch_bytes = config.encoder_batch_bytes or DEFAULT_BATCH_BYTES[self.device.type]
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._ahead = self.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        profile = measure_batch(self.encoder, info, self.dtype, self.device, config.encoder_batch_items, batch_bytes)
        self.profile = profile.with_outputs_of_another() if profile is not None and self._ahead else profile
        outputs = OUTGOING_BYTES[self.device.type] + output_cache_bytes
        whole = max(0, memory_budget(config, self.device) - outputs)
        budget = int(memory_share * whole)
        max_items, batch_bytes = self._fit(config, batch_bytes, budget, whole)
        activation = None if self.profile is None else self.profile.bytes_of(max_items)
        self.memory = MemoryReport.of_encoder(
            config, self.load_report.parameter_bytes, activation, budget, output_cache_bytes
        )
        # Only on CUDA is the largest item measured whatever time it takes: else it is guessed from smaller ones.
        step = self.memory.activation or 0
        self.taken_bytes = outputs + (step if self.device.type == "cuda" else min(step, budget))
        """What it takes beside its weights while it runs: its largest batch, and outputs that have not left yet."""
        self._log.info("memory", **self.memory.describe(), device=self.device.type, batch_items=max_items)
        self._scheduler = EncoderScheduler(max_items, batch_bytes)
        self._runner = BatchRunner(self.encoder, self.device, self._log)
        self._flight: LaunchedBatch | None = None
        self._last_end_s = 0.0
        self._batches = self._items = self._failures = self._last_items = 0
        self._seconds = 0.0

    def _fit(self, config: EngineConfig, batch_bytes: int, budget: int, whole: int) -> tuple[int, int]:
        """The items and bytes of a batch, as many as the budget allows, or a single item within the `whole`."""
        profile, max_items = self.profile, config.encoder_batch_items
        if profile is not None and profile.largest > budget:
            check_encoder_budget(config, self.device, self.load_report.parameter_bytes, whole, profile.smallest)
            max_items = profile.items_within(budget)
            batch_bytes = min(batch_bytes, max_items * profile.item_bytes)
        return max_items, batch_bytes

    def submit(self, key: EncoderKey, item: ProcessedInput) -> None:
        """Queue a granted item. A key that waits already is replaced."""
        self._scheduler.add(key, item)

    def cancel(self, key: EncoderKey) -> None:
        """Forget an item that waits or is being computed; unknown keys are fine, it may be done already."""
        self._scheduler.remove(key)
        if self._flight is not None:
            self._flight.dropped.add(key)

    def has_work(self) -> bool:
        return len(self._scheduler) > 0 or self._flight is not None

    def step(self) -> list[EncoderResult]:
        """Encode one batch, or ahead: launch one, and tell of the one that was launched before.

        Every item has a result, unless it was cancelled: one that fails does not fail its neighbours. Raises what the
        device has found wrong: nothing can be computed after that.
        """
        items = self._scheduler.next_batch()
        batch = self._runner.launch(items) if items else None
        if self._ahead:
            self._flight, batch = batch, self._flight
        return [] if batch is None else self._land(batch)

    def _land(self, batch: LaunchedBatch) -> list[EncoderResult]:
        outputs = self._runner.land(batch)
        start_s, end_s = max(batch.start_s, self._last_end_s), time.time()
        self._last_end_s = end_s
        self._batches += 1
        self._last_items = len(batch.items)
        self._items += len(batch.items)
        self._seconds += end_s - start_s
        results = []
        for (key, _), output in zip(batch.items, outputs, strict=True):
            tensor, error = (None, output) if isinstance(output, ErrorInfo) else (output, None)
            self._failures += error is not None
            if key not in batch.dropped:
                results.append(EncoderResult(key, tensor, error, start_s, end_s))
        return results

    def stats(self) -> dict[str, float]:
        """Gauges and counters of this moment; `encoder_computations` counts the whole process."""
        return {
            "encoder_queue_items": len(self._scheduler),
            "encoder_batches_total": self._batches,
            "encoder_items_total": self._items,
            "encoder_failures_total": self._failures,
            "encoder_batch_items_last": self._last_items,
            "encoder_seconds_total": self._seconds,
            "encoder_attention_fallback": int(self.attention_is_fallback),
            "encoder_computations": encoder_computations.value,
            **self.memory.stats(),
        }
