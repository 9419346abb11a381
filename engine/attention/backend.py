"""The seam between what attention computes and how: a backend plans once per step and runs once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch

from common.errors import TriptychError
from engine.attention.metadata import AttentionMetadata


class AttentionBackend(ABC):
    """Paged attention over one layer's cache, [2, num_blocks, block_size, num_kv_heads, head_dim] (keys, values).

    Causal self-attention and bidirectional cross-attention differ only in `metadata.causal` and in that the keys of
    cross-attention are written beforehand. `plan` does the host work that all layers share.
    """

    name: str

    @abstractmethod
    def plan(self, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> Any:
        """Whatever `run` needs for this step; called once, used by every layer."""

    @abstractmethod
    def run(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim] -> the same shape. Scale is 1 / sqrt(head_dim)."""

    def write(self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put key and value, [num_tokens, num_kv_heads, head_dim], into their slots."""
        flat = cache.view(2, -1, *cache.shape[3:])
        flat[0].index_copy_(0, slot_mapping, key)
        flat[1].index_copy_(0, slot_mapping, value)


def _torch_backend() -> AttentionBackend:
    from engine.attention.torch_backend import TorchBackend

    return TorchBackend()


BACKENDS: Final[dict[str, Callable[[], AttentionBackend]]] = {"torch": _torch_backend}
"""Every backend by name. The FlashInfer one registers here as `flashinfer`."""


def choose_backend(device: torch.device, name: str | None = None) -> AttentionBackend:
    """The backend for a device. Raises TriptychError for a name that there is not."""
    if name is not None and name not in BACKENDS:
        raise TriptychError(
            "invalid_request", f"no attention backend {name!r}; there are: {', '.join(sorted(BACKENDS))}"
        )
    preferred = "flashinfer" if device.type == "cuda" and "flashinfer" in BACKENDS else "torch"
    return BACKENDS[name or preferred]()
