"""Calls computed correctly by FlashInfer; PyTorch's attention serves all others.

From FlashInfer's sources (0.7.1 to 0.7.4) and trackers: kernels are made for float16 and bfloat16. The head size is a
template parameter, unchecked by FA2: sizes other than multiples of 64 can return wrong numbers (flashinfer#4299).
Decoding without tensor cores is compiled for some group sizes only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from common.telemetry import get_logger
from engine.state.spec import HeadSpec

log = get_logger()

DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
HEAD_DIMS: Final = frozenset({64, 128, 256})
APPENDED_HEAD_DIMS: Final = frozenset({64, 128, 256, 512})
"""Head sizes of the compiled `append_paged_kv_cache`."""
MAX_BLOCK_THREADS: Final = 1024
"""Of a CUDA block. Append has one for some tokens, with a thread for every few elements of all key heads."""
SMALL_GROUPS: Final = frozenset({1, 2, 3, 4})
"""Query heads per key head for which the vector units keep up with the memory; larger groups need tensor cores."""
MAX_GROUP: Final = 16
"""Partial results of long sequences are kept for each query head: those of larger groups would not fit into the
workspace."""


def unserved(heads: HeadSpec, dtype: torch.dtype, *, has_ranges: bool = False) -> str | None:
    """Return why FlashInfer does not serve a call; None for a served call.

    `has_ranges`: tokens of one request see different ranges of its keys, other than a causal mask and a window say.
    """
    if dtype not in DTYPES:
        return f"FlashInfer serves {_listed(sorted(map(_name, DTYPES)))}, not {_name(dtype)}"
    if heads.head_dim not in HEAD_DIMS:
        return f"FlashInfer serves heads of {_listed(sorted(HEAD_DIMS))} elements, not of {heads.head_dim}"
    if heads.num_heads % heads.num_kv_heads:
        what = f"{heads.num_heads} query heads over {heads.num_kv_heads} key heads"
        return f"FlashInfer serves equally many query heads for each key head, not {what}"
    if heads.num_heads // heads.num_kv_heads > MAX_GROUP:
        what = f"{heads.num_heads // heads.num_kv_heads}, whose partial results its workspace may not hold"
        return f"FlashInfer serves up to {MAX_GROUP} query heads for each key head, not {what}"
    if heads.biased:
        return "FlashInfer serves scores as they are or masked, not with a bias added"
    if has_ranges:
        return "FlashInfer serves a causal mask and a window, not other ranges of keys for each token of a request"
    return None


def is_appended(num_kv_heads: int, head_dim: int) -> bool:
    """Return whether `append_paged_kv_cache` writes keys and values of the given sizes, in half precision."""
    if head_dim not in APPENDED_HEAD_DIMS:
        return False
    return num_kv_heads * head_dim // max(8, head_dim // 32) <= MAX_BLOCK_THREADS


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(values: Iterable[object]) -> str:
    """`1, 2 and 3`."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}"


def needs_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """Return whether decodes with the given heads run on tensor cores, by the prefill kernel."""
    return num_heads // num_kv_heads not in SMALL_GROUPS


class ReasonLog:
    """Log each reason against FlashInfer once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("attention by PyTorch instead of FlashInfer", reason=reason)
