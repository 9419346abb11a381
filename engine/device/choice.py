"""Which device and which dtype an engine uses."""

from __future__ import annotations

from typing import Final

import torch

from common.config import Device, DType
from common.errors import TriptychError
from common.model_info import ModelInfo
from common.telemetry import get_logger
from engine.models.base import EncoderModel
from engine.native import choice, ops
from engine.native.build import KernelsUnavailableError

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

log = get_logger()


def choose_device(device: Device) -> torch.device:
    """Raises TriptychError("invalid_request") where CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise TriptychError("invalid_request", "device cuda is asked for, but torch finds no CUDA device", "device")
    return torch.device("cuda" if device == "cuda" or (device == "auto" and available) else "cpu")


def choose_dtype(dtype: DType, device: torch.device, info: ModelInfo) -> torch.dtype:
    """auto: float32 on a CPU; on CUDA the checkpoint's own, bfloat16 where it does not say or says float32."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own = DTYPES.get(str(info.text_config.get("dtype") or info.text_config.get("torch_dtype")), torch.bfloat16)
    return torch.bfloat16 if own is torch.float32 else own


def use_layer_kernels(device: torch.device, attention_backend: str) -> bool:
    """Let this process's decoders on CUDA compute their small layers by our own kernels; an attention backend named
    `torch` does not ask for it. False, with a warning, where they do not run."""
    if device.type != "cuda" or attention_backend == "torch":
        return True
    try:
        choice.enable_on_cuda(device)
    except KernelsUnavailableError as error:
        log.warning("small layers are computed by PyTorch alone, which is slower", reason=str(error))
        return False
    return True


def use_kernels(encoder: EncoderModel, device: torch.device, dtype: torch.dtype, attention_backend: str) -> bool:
    """Let an encoder use our own CPU kernels, or FlashInfer's on CUDA, where they serve; an attention backend named
    `torch` forbids it. False, with a warning, where they would serve and do not run."""
    if attention_backend == "torch":
        return True
    if device.type == "cuda" and dtype != torch.float32 and encoder.unmasked is not None:
        # Imported here: it imports transformers, which is slow.
        from engine.encoders.ragged_attention import use_flashinfer

        return use_flashinfer(encoder.unmasked, device)
    if device.type == "cpu" and dtype == torch.bfloat16:
        try:
            ops.enable()
        except KernelsUnavailableError as error:
            log.warning("CPU kernels not available: the encoder computes with PyTorch alone", reason=str(error))
            return False
    return True
