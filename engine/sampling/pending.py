"""Tokens still being chosen by the device."""

from __future__ import annotations

import torch
from torch import Tensor


class PendingTokens:
    """Chosen tokens, `on_device` int64 [num_tokens], and an asynchronous copy on the host.

    The copy goes to pinned memory, on the stream that computes the tokens: nobody waits until `wait` is called. Made
    under the stream that computes them. On a CPU there is nothing to wait for.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.on_device = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._on_host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tokens.device))
        else:
            self._on_host = tokens

    def wait(self) -> list[int]:
        """Return the tokens after all work queued before them. Raises CUDA's errors of that work."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids: list[int] = self._on_host.tolist()
        return token_ids
