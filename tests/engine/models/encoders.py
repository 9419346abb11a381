"""Encoders alone: the model of a folder, its inputs, and the comparison with transformers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.model_info import load_model_info
from engine import processors
from engine.models.base import EncoderModel
from engine.models.registry import load_encoder
from engine.processors import ProcessedInput
from tests.media_files import encoded, noise

PATCHES_ATOL = 1e-4
"""Of Qwen's towers in float32 from the same in float64, with outputs of up to 10. On processors with AVX-512 Triptych's
stray by up to 6e-5, transformers' own by up to 1.2e-4."""
QWEN_SIZES = ((28, 28), (84, 140), (196, 112), (28, 196), (150, 75))


def encoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> EncoderModel:
    return load_encoder(load_model_info(str(folder)), torch.device("cpu"), dtype)[0]


def pictures(
    folder: Path, dtype: str = "float32", sizes: Sequence[tuple[int, int]] = QWEN_SIZES
) -> list[ProcessedInput]:
    processors.init_worker(str(folder), dtype)
    return [processors.process("image", encoded(noise(*size, seed=seed))) for seed, size in enumerate(sizes)]


@torch.inference_mode()
def assert_outputs_equal(
    folder: Path, items: list[ProcessedInput], expected: Callable[[ProcessedInput], Tensor], atol: float = 1e-5
) -> None:
    """Compare the outputs of a batch with `expected`, with those of each item alone, and with the announced sizes."""
    encoder = encoder_of(folder)
    for item, output in zip(items, encoder.encode(items), strict=True):
        torch.testing.assert_close(output, expected(item), rtol=0, atol=atol)
        torch.testing.assert_close(output, encoder.encode([item])[0], rtol=0, atol=atol)
        assert tuple(output.shape) == item.shape
        assert output.nbytes == item.size_bytes


def assert_bfloat16_close(folder: Path, items: list[ProcessedInput]) -> None:
    """Compare the outputs of an encoder in bfloat16 with those in float32; `items` are processed for bfloat16."""
    half, full = (encoder_of(folder, dtype).encode(items) for dtype in (torch.bfloat16, torch.float32))
    for item, low, high in zip(items, half, full, strict=True):
        assert low.dtype == torch.bfloat16
        assert low.nbytes == item.size_bytes
        assert (low.float() - high).norm() < 0.1 * high.norm()
