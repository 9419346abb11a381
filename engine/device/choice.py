"""Choose the device and dtype of an engine."""

from __future__ import annotations

from typing import Final

import torch

from common.config import Device, DType
from common.errors import TriptychError
from common.model_info import ModelInfo

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(device: Device) -> torch.device:
    """Return the device. Raises TriptychError("invalid_request") for CUDA without a CUDA device."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise TriptychError("invalid_request", "device cuda is asked for, but torch finds no CUDA device", "device")
    return torch.device("cuda" if device == "cuda" or (device == "auto" and available) else "cpu")


def choose_dtype(dtype: DType, device: torch.device, info: ModelInfo) -> torch.dtype:
    """Return the dtype. auto: float32 on a CPU; on CUDA the checkpoint's own, bfloat16 for none or float32."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    given = [part.get(key) for part in (info.config, info.text_config) for key in ("dtype", "torch_dtype")]
    own = DTYPES.get(str(next(filter(None, given), None)), torch.bfloat16)
    return torch.bfloat16 if own is torch.float32 else own
