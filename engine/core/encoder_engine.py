"""The encoder worker's engine: granted items in, encoder outputs out, in batches across requests.

    one by one   host    launch N · wait for N · emit N · launch N+1 · wait for N+1 · emit N+1 · ...
    ahead        host    launch N+1 · wait for N · emit N · launch N+2 · wait for N+1 · emit N+1 · ...
                 device  ██ N █████████ N+1 ████████████ N+2 ██ ...

Memory. All batches run on one stream, on which torch's allocator gives memory that N has freed to N+1 while N still
runs: the stream's order keeps the two apart. Activations of two batches never live at once, only the outputs of N
beside the whole of N+1.

Errors. An exception at a launch (shapes that do not fit, too little memory) concerns its batch: once earlier batches
are collected, the items are tried one by one. An error of the device, reported when a batch is waited for, concerns no
item: CUDA refuses all further work of the process. The error ends the worker; other workers encode the items.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from common.config import EngineConfig
from common.errors import ErrorInfo, words_of
from common.model_info import ModelInfo
from common.telemetry import Counter, get_logger
from engine.cache.encoder_cache import in_memory_of_its_own
from engine.core.encoder_profile import measure_batch
from engine.device.choice import choose_device, choose_dtype
from engine.device.memory import MemoryReport, check_encoder_budget, memory_budget
from engine.models.registry import load_encoder
from engine.processors import ProcessedInput

log = get_logger()

DEFAULT_BATCH_BYTES: Final = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}
"""A CPU gains nothing from large batches, and the first output of a batch comes with the last."""
OUTGOING_BYTES: Final = {"cpu": 0, "cuda": 256 * 2**20}
"""Device memory for outputs that have not left yet: the driver of this engine keeps no more of them on the device."""


@dataclass(frozen=True)
class EncoderResult:
    """The output [num_encoder_tokens, hidden_size] of one item on the engine's device, or the error instead.

    `start_s` and `end_s` (Unix time) are those of its batch.
    """

    key: EncoderKey
    tensor: torch.Tensor | None
    error: ErrorInfo | None
    start_s: float
    end_s: float


class EncoderEngine:
    """Runs the encoder of one model. Single-threaded; loads encoder weights only.

    Raises TriptychError("invalid_request") for a text model or a missing device, CheckpointError where the weights do
    not fit the model.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        instance: str = "engine",
        output_cache_bytes: int = 0,
        memory_share: float = 1.0,
    ) -> None:
        """Load the encoder and measure its memory.

        `output_cache_bytes` of memory are left to the driver of this engine, for kept outputs. `memory_share` is the
        engine's part of the process's memory; the rest is for a decoder in the same process.
        """
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device, info)
        self.encoder, self._weight_bytes = load_encoder(info, self.device, self.dtype, config.load_format)
        from engine.encoders.attention import use_kernels  # imports transformers, as the encoder has by now

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
        self._max_items, self._max_bytes = self._fit(config, batch_bytes, budget, whole)
        activation = None if self.profile is None else self.profile.bytes_of(self._max_items)
        self.memory = MemoryReport.of_encoder(config, self._weight_bytes, activation, budget, output_cache_bytes)
        # On a CPU the largest image is guessed from smaller ones, where it would take long.
        step = self.memory.activation or 0
        self.taken_bytes = outputs + (step if self.device.type == "cuda" else min(step, budget))
        """Memory beside the weights while the engine runs: the largest batch, and outputs that have not left yet."""
        self._log.info("memory", **self.memory.describe(), device=self.device.type, batch_items=self._max_items)
        self._waiting: dict[EncoderKey, ProcessedInput] = {}
        self._launched: LaunchedBatch | None = None
        self._last_end_s = 0.0
        self._batches = self._items = self._failures = self._last_items = 0
        self._seconds = 0.0

    def _fit(self, config: EngineConfig, batch_bytes: int, budget: int, whole: int) -> tuple[int, int]:
        """Return the items and bytes of a batch: as many as the budget allows, or a single item within the `whole`."""
        profile, max_items = self.profile, config.encoder_batch_items
        if profile is not None and profile.largest > budget:
            check_encoder_budget(config, self.device, self._weight_bytes, whole, profile.smallest)
            max_items = profile.items_within(budget)
            batch_bytes = min(batch_bytes, max_items * profile.item_bytes)
        return max_items, batch_bytes

    def submit(self, key: EncoderKey, item: ProcessedInput) -> None:
        """Queue a granted item. An item that waits under the same key is replaced."""
        self._waiting[key] = item

    def cancel(self, key: EncoderKey) -> None:
        """Discard an item that waits or is being computed; unknown keys are fine, the item may be done already."""
        self._waiting.pop(key, None)
        if self._launched is not None:
            self._launched.cancelled.add(key)

    def has_work(self) -> bool:
        return bool(self._waiting) or self._launched is not None

    def step(self) -> list[EncoderResult]:
        """Encode one batch; when running ahead, launch a batch and return the results of the previous batch.

        Every item has a result unless cancelled: a failing item does not fail its neighbours. Raises errors that the
        device reports: no further batch can be computed.
        """
        items = self._next_batch()
        batch = self._launch(items) if items else None
        if self._ahead:
            self._launched, batch = batch, self._launched
        return [] if batch is None else self._collect(batch)

    def _next_batch(self) -> list[tuple[EncoderKey, ProcessedInput]]:
        """Pop the longest run from the head of the queue within `_max_items` items and `_max_bytes` bytes of output.

        An item larger than the budget goes alone.
        """
        batch: list[tuple[EncoderKey, ProcessedInput]] = []
        free_bytes = self._max_bytes
        for key, item in self._waiting.items():
            if batch and (len(batch) == self._max_items or item.size_bytes > free_bytes):
                break
            batch.append((key, item))
            free_bytes -= item.size_bytes
        for key, _ in batch:
            del self._waiting[key]
        return batch

    def _launch(self, items: list[tuple[EncoderKey, ProcessedInput]]) -> LaunchedBatch:
        """Queue a batch on the device; a CPU computes now."""
        batch = LaunchedBatch(items, time.monotonic())
        try:
            batch.outputs = self._encode([item for _, item in items])
        except Exception as error:  # whatever one item makes the model raise must not reach the others
            # Frames below hold activations, and the next batch is launched first. This frame cannot be cleared.
            traceback.clear_frames(error.__traceback__)
            batch.error = error
        batch.done = event_behind(self.device)
        return batch

    @torch.inference_mode()
    def _encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        """Raises ValueError for an output other than announced: the receiver has reserved memory for that."""
        encoder_computations.add(len(items))
        outputs = self.encoder.encode(items)
        for item, output in zip(items, outputs, strict=True):
            found = tuple(output.shape), str(output.dtype).removeprefix("torch.")
            if found != (item.shape, item.dtype):
                promise = f"the preprocessor had announced {item.shape} {item.dtype}"
                raise ValueError(f"its output is {found[0]} {found[1]}, {promise}")
        # Copied here, before the next batch is launched: a later copy would wait for that batch.
        return [in_memory_of_its_own(output) for output in outputs]

    def _await(self, batch: LaunchedBatch) -> list[Tensor | ErrorInfo]:
        """Wait for a batch; return an output or an error per item. Raises errors that the device reports."""
        if batch.done is not None:
            batch.done.synchronize()
        if batch.error is None:
            return list(batch.outputs)
        if len(batch.items) > 1:
            self._log.warning(
                "encoder batch failed, trying its items one by one", items=len(batch.items), error=str(batch.error)
            )
            return [self._await(self._launch([one]))[0] for one in batch.items]
        shape = batch.items[0][1].shape
        self._log.error("encoder failed", shape=shape, exc_info=batch.error)
        return [ErrorInfo("internal_error", f"the encoder failed on this item: {words_of(batch.error)}")]

    def _collect(self, batch: LaunchedBatch) -> list[EncoderResult]:
        outputs = self._await(batch)
        now_s, end_s = time.monotonic(), time.time()
        start_s = end_s - (now_s - max(batch.start_s, self._last_end_s))
        self._last_end_s = now_s
        self._batches += 1
        self._last_items = len(batch.items)
        self._items += len(batch.items)
        self._seconds += end_s - start_s
        results = []
        for (key, _), output in zip(batch.items, outputs, strict=True):
            tensor, error = (None, output) if isinstance(output, ErrorInfo) else (output, None)
            self._failures += error is not None
            if key not in batch.cancelled:
                results.append(EncoderResult(key, tensor, error, start_s, end_s))
        return results

    def stats(self) -> dict[str, float]:
        """Return gauges and counters of this moment; `encoder_computations` counts the whole process."""
        return {
            "encoder_queue_items": len(self._waiting),
            "encoder_batches_total": self._batches,
            "encoder_items_total": self._items,
            "encoder_failures_total": self._failures,
            "encoder_batch_items_last": self._last_items,
            "encoder_seconds_total": self._seconds,
            "encoder_attention_fallback": int(self.attention_is_fallback),
            "encoder_computations": encoder_computations.value,
            **self.memory.stats(),
        }


EncoderKey: TypeAlias = tuple[str, int, int]
"""Identity of an item: request id, input id, attempt; or content hash, number, 0."""

encoder_computations = Counter()
"""Items encoded in this process. A prefill-decode worker exports the count, which must stay 0."""


@dataclass
class LaunchedBatch:
    """A batch on the device: `outputs` are complete once `done` has come (None: complete now), or `error` was raised.

    Keys in `cancelled` were cancelled meanwhile. `start_s` is of the monotonic clock.
    """

    items: list[tuple[EncoderKey, ProcessedInput]]
    start_s: float
    outputs: list[Tensor] = field(default_factory=list)
    error: Exception | None = None
    done: torch.cuda.Event | None = None
    cancelled: set[EncoderKey] = field(default_factory=set)


def event_behind(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind all work queued on this stream; None on a CPU.

    Other streams of a GPU are not waited for: outputs of earlier batches may still leave on streams of their own.
    """
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
