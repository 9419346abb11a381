"""The shapes of attention that the check compares with dense attention, by which kernels are built ahead, too: every
size of heads that is served in every dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class AttentionCase:
    """Heads of one size in one dtype; with a `window`, self-attention sees so many keys."""

    dtype: str
    num_kv_heads: int
    num_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        window = f"-window-{self.window}" if self.window else ""
        return f"{self.dtype}-{self.num_kv_heads}-{self.num_heads}-{self.head_dim}{window}"


CASES: Final = (
    AttentionCase("bfloat16", 3, 3, 64),  # Whisper
    AttentionCase("bfloat16", 3, 9, 64),  # SmolLM2
    AttentionCase("bfloat16", 2, 14, 64),  # Qwen2.5, 0.5B: groups that need tensor cores
    AttentionCase("bfloat16", 2, 16, 128),  # Qwen2.5, 3B
    AttentionCase("bfloat16", 4, 4, 128),  # Llama 2
    AttentionCase("bfloat16", 2, 8, 128),  # Llama 3, and the largest group on the vector units
    AttentionCase("bfloat16", 1, 5, 128),  # Qwen2.5, 14B: the smallest on tensor cores
    AttentionCase("bfloat16", 1, 16, 64),  # the largest that is served
    AttentionCase("bfloat16", 3, 9, 64, 17),  # a window, as Mistral's
    AttentionCase("bfloat16", 2, 14, 64, 300),  # one on tensor cores, over many blocks
    AttentionCase("float16", 3, 9, 64),
    AttentionCase("bfloat16", 2, 4, 256),
    AttentionCase("bfloat16", 1, 8, 256),
    AttentionCase("bfloat16", 2, 8, 128, 300),  # Mistral, 7B
    AttentionCase("float16", 2, 8, 128),
    AttentionCase("float16", 1, 8, 128),
    AttentionCase("float16", 2, 4, 256),
    AttentionCase("float16", 2, 14, 64, 17),
    AttentionCase("float16", 2, 8, 128, 17),
    AttentionCase("bfloat16", 2, 4, 80),  # falls back
    AttentionCase("float32", 3, 9, 64),  # falls back
)
"""FlashInfer compiles kernels for each kind of them. Models of the check and of its benchmarks have heads of some of
these kinds, and no others."""
