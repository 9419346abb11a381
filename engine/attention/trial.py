"""A decode and a prefill of three tokens: whether a backend's kernels run here, for some are compiled on demand."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.state.spec import HeadSpec

_BLOCK_SIZE: Final = 16


def try_out(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, heads: HeadSpec) -> None:
    """Write, plan and run once with every kernel that a decoder with these heads takes of a backend.

    Cross-attention takes those of self-attention without a window. Compiles what was not built ahead, which can take
    minutes, and waits for the device. Raises whatever a compiler, a loader or the device has to say.
    """
    table = np.array([[0], [1]])
    metadata = AttentionMetadata(
        query_start_loc=[0, 1, 3],
        seq_lens=[1, 2],
        block_table=torch.from_numpy(table).to(device),
        block_lists=[[0], [1]],
        slot_mapping=torch.tensor([0, _BLOCK_SIZE, _BLOCK_SIZE + 1], dtype=backend.slot_dtype, device=device),
        causal=True,
        num_decodes=1,
        host_table=table,
    )
    cache = torch.zeros(2, 2, _BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device)
    query = torch.zeros(3, heads.num_heads, heads.head_dim, dtype=dtype, device=device)
    key = query[:, : heads.num_kv_heads]
    assert metadata.slot_mapping is not None
    backend.write(cache, key, key, metadata.slot_mapping)
    plan = backend.plan(metadata, _BLOCK_SIZE, dtype)
    for window in heads.windows:
        backend.run(query, cache, plan, window=window)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
