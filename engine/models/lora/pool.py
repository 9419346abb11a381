"""The adapters in memory beside a decoder's weights, and the products that they add to its layers.

A step may have rows of several adapters and of none: x A^T B^T is added to the rows of each (as Punica, Chen et al.,
2023, with a product per adapter in place of a kernel for all). Layers have hooks for this, which find nothing to do
in a step without adapters; a decoder without adapters has no hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import ErrorInfo, TriptychError
from common.model_info import ModelInfo
from engine.device.h2d import send
from engine.models.base import DecoderModel
from engine.models.layers import linear
from engine.models.lora.weights import AdapterFiles, LowRank
from engine.state.inputs import ScheduledStep, StepInputs


class AdapterPool:
    """Up to `max_loras` adapters, loaded when a step needs them; the least recently used makes way.

    `capacity_bytes` are those of the largest so many. Raises CheckpointError for an adapter that does not fit.
    """

    def __init__(
        self, model: DecoderModel, info: ModelInfo, max_loras: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._files = AdapterFiles(model, info)
        self._max_loras, self._device, self._dtype = max_loras, device, dtype
        sizes = sorted(self._files.num_values(name) for name in info.adapters)
        self.capacity_bytes = sum(sizes[-max_loras:]) * dtype.itemsize
        for name, layer in self._files.layers.items():
            layer.register_forward_hook(partial(self._add, name))
        self.clear()

    def clear(self) -> None:
        """Begin without adapters in memory, and without those of a step."""
        self.loaded: OrderedDict[str, dict[str, LowRank]] = OrderedDict()
        self.groups: list[tuple[Tensor, dict[str, LowRank]]] = []  # rows of the step, and weights by layer
        self.counters = {"adapter_loads": 0, "adapter_evictions": 0}

    def load(self, needed: Collection[str]) -> dict[str, ErrorInfo]:
        """Load the adapters that are needed from now on, `max_loras` at most; return those that cannot be read, with
        the reasons."""
        failed = {}
        for name in sorted(needed, key=lambda one: one not in self.loaded):  # first, what is there is kept
            if name in self.loaded:
                self.loaded.move_to_end(name)
                continue
            if len(self.loaded) == self._max_loras:
                self.loaded.popitem(last=False)
                self.counters["adapter_evictions"] += 1
            try:
                self.loaded[name] = self._files.load(name, self._device, self._dtype)
                self.counters["adapter_loads"] += 1
            except (TriptychError, OSError) as error:
                message = f"the adapter {name!r} cannot be loaded: {error}"
                failed[name] = ErrorInfo("model_not_found", message, "adapter")
        return failed

    def select(self, step: ScheduledStep, inputs: StepInputs) -> None:
        """Set the adapters of the next forward pass, which are loaded."""
        starts, rows = inputs.query_start_loc.tolist(), defaultdict[str, list[int]](list)
        for index, sequence in enumerate(step.sequences):
            if sequence.sampling.adapter:
                rows[sequence.sampling.adapter] += range(starts[index], starts[index + 1])
        tensors = send(self._device, *(np.array(numbers, np.int64) for numbers in rows.values())) if rows else []
        self.groups = [(tensor, self.loaded[name]) for tensor, name in zip(tensors, rows, strict=True)]

    def _add(self, name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Add to the fresh output of a layer, in place."""
        for rows, weights in self.groups:
            if name in weights:
                down, up = weights[name]
                output.index_add_(0, rows, linear(linear(inputs[0].index_select(0, rows), down), up))
