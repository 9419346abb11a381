"""transformers' encoders with our attention kernel where it serves: bfloat16 on a CPU, whole sequences, heads of 64."""

from __future__ import annotations

import copy
from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.native import ops

NAME: Final = "triptych_encoder"


def with_encoder_attention(config: Any) -> Any:
    """A copy of an encoder's configuration that makes its layers call `attend`."""
    AttentionInterface.register(NAME, attend)
    own = copy.deepcopy(config)
    own._attn_implementation = NAME
    return own


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """query, key, value [batch, num_heads, size, head_dim] -> [batch, size, num_heads, head_dim].

    What the kernel does not serve, and every float32 tensor, goes to PyTorch's attention, as without us.
    """
    if attention_mask is None and dropout == 0.0 and ops.serves_encoder(query, key, value):
        return ops.encoder_attention(query, key, value, scaling or query.shape[-1] ** -0.5), None
    attended, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more
    )
    return attended, None
