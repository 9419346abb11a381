"""Two backends for a batch: one for decodes, one for prefills.

What matters is how many tokens share the keys that are read: a decoder prompt of four tokens over 1500 encoder rows is
no different from a decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch

from engine.attention.backend import AttentionBackend, FixedPlan, PlanSizes
from engine.attention.metadata import AttentionMetadata

FEW_TOKENS: Final = 8
"""Up to here the tokens of a request are computed one by one, as decodes."""
SHORT_KEYS: Final = 256
"""So are float32 prompts of up to as many tokens: half of what a square of scores would compute is in the future."""


@dataclass(frozen=True)
class _PhasePlan:
    """Tokens before `num_decodes` belong to the decode backend. Without any, `decode` is None."""

    num_decodes: int
    decode: Any
    prefill: Any


class PhasedBackend(AttentionBackend):
    """Send a batch of small requests to `decode` as a whole. Otherwise requests with a single query token go to
    `decode`, the others to `prefill`."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill, self.decode = prefill, decode
        self.name = f"{prefill.name}+{decode.name}"
        self.gathered_share = decode.gathered_share
        self.slot_dtype = decode.slot_dtype
        self.calls_kernels = decode.calls_kernels

    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> Any:
        counts = (end - start for start, end in pairwise(metadata.query_start_loc))
        short = SHORT_KEYS if metadata.causal and dtype == torch.float32 else 0
        if all(count <= FEW_TOKENS or keys <= short for count, keys in zip(counts, metadata.seq_lens, strict=True)):
            return self.decode.plan(metadata, block_size, dtype)
        decode = self.decode.plan(metadata.decodes(), block_size, dtype) if metadata.num_decodes else None
        return _PhasePlan(metadata.num_decodes, decode, self.prefill.plan(metadata.prefills(), block_size, dtype))

    def run(self, query: torch.Tensor, cache: torch.Tensor, plan: Any, **options: Any) -> torch.Tensor:
        if not isinstance(plan, _PhasePlan):
            return self.decode.run(query, cache, plan, **options)
        if plan.decode is None:
            return self.prefill.run(query, cache, plan.prefill, **options)
        decodes = self.decode.run(query[: plan.num_decodes], cache, plan.decode, **options)
        return torch.cat((decodes, self.prefill.run(query[plan.num_decodes :], cache, plan.prefill, **options)))

    def make_fixed_plan(self, sizes: PlanSizes) -> FixedPlan | None:
        return self.decode.make_fixed_plan(sizes)

    def write(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.decode.write(cache, key, value, slot_mapping)
