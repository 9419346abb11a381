"""Batches of an encoder: launched, and collected once the device has computed them.

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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from common.errors import ErrorInfo
from common.telemetry import Counter
from engine.cache.output_cache import in_memory_of_its_own
from engine.models.base import EncoderModel
from engine.processors import ProcessedInput

EncoderKey: TypeAlias = tuple[str, int, int]
"""Identity of an item: request id, input id, attempt; or content hash, number, 0."""

encoder_computations = Counter()
"""Items encoded in this process. A prefill-decode worker exports the count, which must stay 0."""


@dataclass
class LaunchedBatch:
    """A batch on the device: `outputs` are complete once `done` has come (None: complete now), or `error` was raised.

    Keys in `cancelled` were cancelled meanwhile. `start_s` is Unix time.
    """

    items: list[tuple[EncoderKey, ProcessedInput]]
    start_s: float
    outputs: list[Tensor] = field(default_factory=list)
    error: Exception | None = None
    done: torch.cuda.Event | None = None
    cancelled: set[EncoderKey] = field(default_factory=set)


class BatchRunner:
    """Launches and collects the batches of one encoder; failures go to `log`."""

    def __init__(self, encoder: EncoderModel, device: torch.device, log: Any) -> None:
        self._encoder = encoder
        self._device = device
        self._log = log

    def launch(self, items: list[tuple[EncoderKey, ProcessedInput]]) -> LaunchedBatch:
        """Queue a batch on the device; a CPU computes now."""
        batch = LaunchedBatch(items, time.time())
        try:
            batch.outputs = self._encode([item for _, item in items])
        except Exception as error:  # whatever one item makes the model raise must not reach the others
            # Frames below hold activations, and the next batch is launched first. This frame cannot be cleared.
            traceback.clear_frames(error.__traceback__)
            batch.error = error
        batch.done = event_behind(self._device)
        return batch

    def collect(self, batch: LaunchedBatch) -> list[Tensor | ErrorInfo]:
        """Wait for a batch; return an output or an error per item. Raises errors that the device reports."""
        if batch.done is not None:
            batch.done.synchronize()
        if batch.error is None:
            return list(batch.outputs)
        if len(batch.items) > 1:
            self._log.warning(
                "encoder batch failed, trying its items one by one", items=len(batch.items), error=str(batch.error)
            )
            return [self.collect(self.launch([one]))[0] for one in batch.items]
        shape = batch.items[0][1].shape
        self._log.error("encoder failed", shape=shape, exc_info=batch.error)
        why = batch.error or type(batch.error).__name__
        return [ErrorInfo("internal_error", f"the encoder failed on this item: {why}")]

    def _encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        encoder_computations.add(len(items))
        outputs = self._encoder.encode(items)
        for item, output in zip(items, outputs, strict=True):
            _check_promise(item, output)
        # Copied here, before the next batch is launched: a later copy would wait for that batch.
        return [in_memory_of_its_own(output) for output in outputs]


def event_behind(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind all work queued on this stream; None on a CPU.

    Other streams of a GPU are not waited for: outputs of earlier batches may still leave on streams of their own.
    """
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _check_promise(item: ProcessedInput, output: Tensor) -> None:
    """Raise ValueError for an output other than `item.shape` and `item.dtype`: the receiver has reserved for these."""
    dtype = str(output.dtype).removeprefix("torch.")
    if tuple(output.shape) != item.shape or dtype != item.dtype:
        raise ValueError(
            f"its output is {tuple(output.shape)} {dtype}, the preprocessor had announced {item.shape} {item.dtype}"
        )
