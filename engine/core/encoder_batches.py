"""Batches of an encoder: launched, and landed once the device has computed them.

    one by one   host    launch N · wait for N · tell N · launch N+1 · wait for N+1 · tell N+1 · ...
    ahead        host    launch N+1 · wait for N · tell N · launch N+2 · wait for N+1 · tell N+1 · ...
                 device  ██ N █████████ N+1 ████████████ N+2 ██ ...

Memory. All batches run on one stream, on which torch's allocator gives what N has freed to N+1 while N still runs: the
stream's order keeps them apart. So the activations of two batches never live at once, only the outputs of N beside all
that N+1 takes.

Errors. What is raised at a launch (shapes that do not fit, too little memory) is about its batch: once those before it
have landed, its items are tried one by one. What the device reports when it is waited for is about no item any more:
CUDA refuses everything to a process that has had one. It is raised, and ends the worker; others encode its items.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.errors import ErrorInfo
from engine.cache.output_cache import in_memory_of_its_own
from engine.models.base import EncoderModel
from engine.processors import ProcessedInput
from engine.scheduler.encoder import EncoderKey


@dataclass
class LaunchedBatch:
    """What is being computed: `outputs` are there once `done` has come (None: they are there), or `error` says what was
    raised instead. Keys in `dropped` were cancelled meanwhile. `start_s` is Unix time."""

    items: list[tuple[EncoderKey, ProcessedInput]]
    start_s: float
    outputs: list[Tensor] = field(default_factory=list)
    error: Exception | None = None
    done: torch.cuda.Event | None = None
    dropped: set[EncoderKey] = field(default_factory=set)


class BatchRunner:
    """Launches and lands the batches of one encoder; `log` is told of what fails."""

    def __init__(self, encoder: EncoderModel, device: torch.device, log: Any) -> None:
        self._encoder = encoder
        self._device = device
        self._log = log

    def launch(self, items: list[tuple[EncoderKey, ProcessedInput]]) -> LaunchedBatch:
        """Queue a batch on the device; on a CPU it is computed now."""
        batch = LaunchedBatch(items, time.time())
        try:
            batch.outputs = self._launch([item for _, item in items])
        except Exception as error:  # whatever one item makes the model raise must not reach the others
            traceback.clear_frames(error.__traceback__)  # they hold activations, and the next batch is launched first
            batch.error = error
        batch.done = event_behind(self._device)
        return batch

    def land(self, batch: LaunchedBatch) -> list[Tensor | ErrorInfo]:
        """Wait for a batch: an output or an error per item. Raises what the device has found wrong."""
        _wait_for(batch.done)
        if batch.error is None:
            return list(batch.outputs)
        if len(batch.items) > 1:
            self._log.warning(
                "encoder batch failed, trying its items one by one", items=len(batch.items), error=str(batch.error)
            )
            return [self.land(self.launch([one]))[0] for one in batch.items]
        shape = batch.items[0][1].shape
        self._log.error("encoder failed", shape=shape, exc_info=batch.error)
        why = batch.error or type(batch.error).__name__
        return [ErrorInfo("internal_error", f"the encoder failed on this item: {why}")]

    def _launch(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        outputs = self._encoder.encode(items)
        for item, output in zip(items, outputs, strict=True):
            _check_promise(item, output)
        # Here and not by whoever takes them: a copy then would stand behind the next batch.
        return [in_memory_of_its_own(output) for output in outputs]


def event_behind(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that is queued on this stream; None on a CPU.

    Of a GPU, only this stream is waited for: outputs of earlier batches may still be on their way to others, on streams
    of their own.
    """
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _wait_for(done: torch.cuda.Event | None) -> None:
    if done is not None:
        done.synchronize()


def _check_promise(item: ProcessedInput, output: Tensor) -> None:
    """The room that the receiver has reserved is that of `item.shape` and `item.dtype`, computed before encoding."""
    dtype = str(output.dtype).removeprefix("torch.")
    if tuple(output.shape) != item.shape or dtype != item.dtype:
        raise ValueError(
            f"its output is {tuple(output.shape)} {dtype}, the preprocessor had announced {item.shape} {item.dtype}"
        )
