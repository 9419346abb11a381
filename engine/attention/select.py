"""Select the attention backend for a device, a dtype and the heads of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from common.errors import how_to_install, invalid
from common.telemetry import get_logger
from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.attention.native_backend import NativeBackend
from engine.attention.split_by_phase import PhasedBackend
from engine.attention.torch_backend import TorchBackend
from engine.native.build import KernelsUnavailableError, in_one_line
from engine.state.spec import HeadSpec

_SMALL_HEADS: Final = HeadSpec(num_heads=1, num_kv_heads=1, head_dim=64)
_TRIAL_BLOCK: Final = 16

log = get_logger()


@dataclass(frozen=True)
class BackendEntry:
    """A backend and the calls served. `make`, given a device, a dtype and the decoder's heads, raises
    KernelsUnavailableError if the backend cannot run."""

    make: Callable[[torch.device, torch.dtype, HeadSpec], AttentionBackend]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: float = math.inf

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return device.type in self.devices and dtype in self.dtypes and head_dim <= self.max_head_dim


def _flashinfer_backend(device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> AttentionBackend:
    """Make the backend after trying the kernels: a machine may lack the means to compile them."""
    from engine.attention.flashinfer.backend import FlashInferBackend

    try:
        backend = FlashInferBackend(device, dtype, heads)
    except ImportError as error:
        reason = f"FlashInfer cannot be imported ({error}); install it: {how_to_install('cuda')}"
        raise KernelsUnavailableError(reason) from error
    try:
        try_out(backend, device, dtype, heads)
    except Exception as error:  # of compilers, of a loader or of a driver: what these raise is documented nowhere
        raise KernelsUnavailableError(kernels_missing(error)) from error
    return backend


def _native_backend(device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> AttentionBackend:
    """Make the backend for all calls, or with PyTorch's for prompts that the kernel would compute token by token."""
    native = NativeBackend()
    return PhasedBackend(TorchBackend(device), native) if dtype == torch.float32 or heads.biased else native


def try_out(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> None:
    """Write, plan and run once with every kernel needed for a decoder with the given heads.

    Cross-attention takes those of self-attention without a window. Compiles what was not built ahead, which can take
    minutes, and waits for the device. Raises whatever a compiler, a loader or the device has to say.
    """
    table = np.array([[0], [1]])
    metadata = AttentionMetadata(
        query_start_loc=[0, 1, 3],
        seq_lens=[1, 2],
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.tensor([0, _TRIAL_BLOCK, _TRIAL_BLOCK + 1], dtype=backend.slot_dtype, device=device),
        causal=True,
        num_decodes=1,
        host_table=table,
    )
    cache = torch.zeros(2, 2, _TRIAL_BLOCK, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device)
    query = torch.zeros(3, heads.num_heads, heads.head_dim, dtype=dtype, device=device)
    key = query[:, : heads.num_kv_heads]
    assert metadata.slot_mapping is not None
    backend.write(cache, key, key, metadata.slot_mapping)
    plan = backend.plan(metadata, _TRIAL_BLOCK, dtype)
    for window in heads.windows:
        backend.run(query, cache, plan, window=window)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_missing(error: Exception) -> str:
    """Return why FlashInfer's kernels do not run, and the remedy."""
    return (
        f"FlashInfer's kernels do not run here ({in_one_line(error)}); install nvcc and ninja, which compile them at "
        "the first start, or bring kernels that were built ahead (docs/how-to/cuda.md)"
    )


BACKENDS: Final[dict[str, BackendEntry]] = {
    "flashinfer": BackendEntry(
        _flashinfer_backend,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
    ),
    "native": BackendEntry(
        _native_backend,
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        max_head_dim=256,
    ),
    "torch": BackendEntry(
        lambda device, *_: TorchBackend(device),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    ),
}
"""Every backend by name, in order of preference: the first that serves device, dtype and heads, and runs, is taken."""


def choose_backend(
    device: torch.device, dtype: torch.dtype = torch.float32, name: str = "auto", heads: HeadSpec = _SMALL_HEADS
) -> AttentionBackend:
    """Return the backend with the `name`, or the best for a device, a dtype and a decoder's heads. Logs the choice.

    What stands in for one that cannot run here `is_fallback`. Raises TriptychError("invalid_request") for a name that
    cannot run here or serve this device, dtype and size of heads.
    """
    backend = _choose(device, dtype, heads) if name == "auto" else _make_named(name, device, dtype, heads)
    log.info("attention backend", backend=backend.name, device=device.type, dtype=str(dtype).removeprefix("torch."))
    return backend


def _make_named(name: str, device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> AttentionBackend:
    entry = BACKENDS[name]
    if not entry.serves(device, dtype, heads.head_dim):
        raise invalid(
            f"attention backend {name!r} does not serve {dtype} with heads of {heads.head_dim} on {device.type}; "
            "leave it at auto",
            "attention_backend",
        )
    try:
        return entry.make(device, dtype, heads)
    except KernelsUnavailableError as error:
        raise invalid(f"attention backend {name!r}: {error}", "attention_backend") from error


def _choose(device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> AttentionBackend:
    """Return the first backend that serves and runs."""
    is_fallback = False
    for name, entry in BACKENDS.items():
        if not entry.serves(device, dtype, heads.head_dim):
            continue
        try:
            backend = entry.make(device, dtype, heads)
        except KernelsUnavailableError as error:
            is_fallback = True
            log.warning("attention backend not available", backend=name, reason=str(error))
        else:
            backend.is_fallback = is_fallback
            return backend
    raise invalid(f"no attention backend serves {dtype} on {device.type}")
