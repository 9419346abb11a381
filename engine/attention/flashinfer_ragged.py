"""FlashInfer's attention over sequences laid end to end, for encoders.

Heads of vision towers have 72 or 80 dimensions, for which there are no kernels. They are padded with zeros to the next
size that there is, which changes no score and adds zeros to the output: a third of the work more, but one launch for a
batch of pictures and their windows instead of one for each window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.backend import HeadSpec
from engine.attention.flashinfer_wrappers import RaggedCall, RaggedWrapper, Workspace
from engine.attention.paged_batch import RaggedBatch
from engine.attention.served import ReasonLog, padded_head_dim, unserved
from engine.attention.torch_backend import TorchBackend
from engine.models.base import PositionBias


class FlashInferRagged:
    """Encoder attention: every token sees all tokens of its own sequence."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._torch = TorchBackend(workspace.device)
        self._wrappers: dict[RaggedCall, RaggedWrapper] = {}
        self._reasons = ReasonLog()

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        *,
        scale: float | None = None,
        bias: PositionBias | None = None,
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query.

        `scale` is 1 / sqrt(head_dim) if not given.
        """
        head_dim = query.shape[2]
        heads = HeadSpec(query.shape[1], key.shape[1], padded_head_dim(head_dim), biased=bias is not None)
        reason = unserved(heads, query.dtype)
        if reason is not None:
            self._reasons.tell(reason)
            return self._torch.run_ragged(query, key, value, batch.plan_of(self._torch), scale=scale, bias=bias)
        if heads.head_dim != head_dim:
            scale = head_dim**-0.5 if scale is None else scale
            query, key, value = (F.pad(x, (0, heads.head_dim - head_dim)) for x in (query, key, value))
        call = RaggedCall(heads.num_heads, heads.num_kv_heads, heads.head_dim, query.dtype, scale)
        wrapper = self._wrappers.get(call)
        if wrapper is None:
            wrapper = self._wrappers[call] = RaggedWrapper(self._workspace, call)
        wrapper.bring_to(batch)
        return wrapper.run(query, key, value)[..., :head_dim]
