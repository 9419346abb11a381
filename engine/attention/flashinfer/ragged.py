"""FlashInfer's attention over sequences laid end to end, for encoders.

Many vision towers have heads of 72 or 80, for which there are no kernels. These go to PyTorch's attention, whose
kernels take every multiple of 8: padded to 128, they would be computed with 1.6 times the work.
"""

from __future__ import annotations

from typing import Final

import torch

from engine.attention.flashinfer.paged_batch import RaggedBatch
from engine.attention.flashinfer.served import ReasonLog, unserved
from engine.attention.flashinfer.wrappers import RaggedCall, RaggedWrapper, Workspace
from engine.attention.torch_backend import run_ragged
from engine.state.spec import HeadSpec

KEPT_PLANS: Final = 2
"""For each kind of call: layers of Qwen2.5-VL look at windows, and every eighth at whole images."""


class FlashInferRagged:
    """Encoder attention: every token sees the tokens of the same sequence, all of them or those of a mask."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._wrappers: dict[RaggedCall, list[RaggedWrapper]] = {}
        self._reasons = ReasonLog()

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query.

        `scale` is 1 / sqrt(head_dim) if not given. Ask `serves` first for a masked batch.
        """
        heads = HeadSpec(query.shape[1], key.shape[1], query.shape[2])
        if not self.serves(heads, query.dtype):
            return run_ragged(query, key, value, batch.alike, scale)
        call = RaggedCall(heads, query.dtype, scale, masked=batch.mask is not None)
        return self._planned(call, batch).run(query, key, value)

    def serves(self, heads: HeadSpec, dtype: torch.dtype) -> bool:
        """Return whether FlashInfer computes this; the log tells once why not."""
        reason = unserved(heads, dtype)
        if reason is not None:
            self._reasons.warn(reason)
        return reason is None

    def _planned(self, call: RaggedCall, batch: RaggedBatch) -> RaggedWrapper:
        """Return a wrapper planned for the batch: an existing plan, a new wrapper, or the least recently used."""
        wrappers = self._wrappers.setdefault(call, [])
        index = next((index for index, wrapper in enumerate(wrappers) if wrapper.batch is batch), None)
        if index is not None:
            wrapper = wrappers.pop(index)
        elif len(wrappers) < KEPT_PLANS:
            wrapper = RaggedWrapper(self._workspace, call)
        else:
            wrapper = wrappers.pop(0)
        wrapper.bring_to(batch)
        wrappers.append(wrapper)
        return wrapper
