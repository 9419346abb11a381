"""The encoder worker's engine: granted items in, encoder outputs out, in batches across requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from common.config import EngineConfig
from common.errors import ErrorInfo
from common.model_info import ModelInfo
from common.telemetry import get_logger
from engine.counters import encoder_computations
from engine.device import choose_device, choose_dtype, use_kernels
from engine.encoder_profile import measure_batch
from engine.memory import MemoryReport, check_encoder_budget, memory_budget
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
        self, info: ModelInfo, config: EngineConfig, instance: str = "engine", output_cache_bytes: int = 0
    ) -> None:
        """`output_cache_bytes` of its memory are left to whoever drives this engine, for outputs that are kept."""
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device, info)
        self.encoder, self.load_report = load_encoder(info, self.device, self.dtype, config.load_format)
        use_kernels(self.encoder, self.device, self.dtype, config.attention_backend)
        self._log = log.bind(engine=instance)
        batch_bytes = config.encoder_batch_bytes or DEFAULT_BATCH_BYTES[self.device.type]
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.profile = measure_batch(
            self.encoder, info, self.dtype, self.device, config.encoder_batch_items, batch_bytes
        )
        self.memory, max_items, batch_bytes = self._fit(config, batch_bytes, output_cache_bytes)
        self._scheduler = EncoderScheduler(max_items, batch_bytes)
        self._batches = self._items = self._failures = self._last_items = 0
        self._seconds = 0.0

    def _fit(self, config: EngineConfig, batch_bytes: int, kept_bytes: int) -> tuple[MemoryReport, int, int]:
        """Where the memory goes, and the items and bytes of a batch, as many as the budget allows."""
        weights = self.load_report.parameter_bytes
        outputs = OUTGOING_BYTES[self.device.type] + kept_bytes
        budget = max(0, memory_budget(config, self.device) - outputs)
        profile, max_items = self.profile, config.encoder_batch_items
        if profile is not None and profile.largest > budget:
            check_encoder_budget(config, self.device, weights, budget, profile.smallest)
            max_items = profile.items_within(budget)
            batch_bytes = min(batch_bytes, max_items * profile.item_bytes)
        activation = None if profile is None else profile.largest
        report = MemoryReport.of_encoder(config, weights, activation, budget, kept_bytes)
        self._log.info("memory", **report.describe(), device=self.device.type, batch_items=max_items)
        return report, max_items, batch_bytes

    def submit(self, key: EncoderKey, item: ProcessedInput) -> None:
        """Queue a granted item. A key that waits already is replaced."""
        self._scheduler.add(key, item)

    def cancel(self, key: EncoderKey) -> None:
        """Forget an item that waits; unknown keys are fine, it may be done already."""
        self._scheduler.remove(key)

    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    def step(self) -> list[EncoderResult]:
        """Encode one batch. Every item of it has a result: one that fails does not fail its neighbours."""
        batch = self._scheduler.next_batch()
        if not batch:
            return []
        start_s = time.time()
        outputs = self._encode([item for _, item in batch])
        end_s = time.time()
        self._batches += 1
        self._last_items = len(batch)
        self._items += len(batch)
        self._seconds += end_s - start_s
        results = []
        for (key, _), output in zip(batch, outputs, strict=True):
            tensor, error = (None, output) if isinstance(output, ErrorInfo) else (output, None)
            self._failures += error is not None
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
            "encoder_computations": encoder_computations.value,
            **self.memory.stats(),
        }

    def _encode(self, items: Sequence[ProcessedInput]) -> list[torch.Tensor | ErrorInfo]:
        """An output or an error per item; after an error the items are tried one by one."""
        try:
            outputs = self.encoder.encode(items)
            _wait_for(self.device)
            for item, output in zip(items, outputs, strict=True):
                _check_promise(item, output)
            return list(outputs)
        except Exception as error:  # whatever one item makes the model raise must not reach the others
            if len(items) > 1:
                self._log.warning(
                    "encoder batch failed, trying its items one by one", items=len(items), error=str(error)
                )
                return [self._encode([item])[0] for item in items]
            self._log.exception("encoder failed", shape=items[0].shape)
            return [ErrorInfo("internal_error", f"the encoder failed on this item: {error or type(error).__name__}")]


def _wait_for(device: torch.device) -> None:
    """Return once the batch is computed. Of a GPU, only this stream is waited for: outputs of earlier batches may still
    be on their way to others, on streams of their own."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).record_event().synchronize()


def _check_promise(item: ProcessedInput, output: torch.Tensor) -> None:
    """The room that the receiver has reserved is that of `item.shape` and `item.dtype`, computed before encoding."""
    dtype = str(output.dtype).removeprefix("torch.")
    if tuple(output.shape) != item.shape or dtype != item.dtype:
        raise ValueError(
            f"its output is {tuple(output.shape)} {dtype}, the preprocessor had announced {item.shape} {item.dtype}"
        )
