"""Encoders: pictures and seconds of sound per second, beside transformers' own module with PyTorch's attention."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from common.config import EngineConfig
from common.model_info import load_model_info
from engine import processors
from engine.encoder_engine import EncoderEngine
from engine.processors import ProcessedInput
from launch.gpu.bench.pictures import noise_picture
from launch.gpu.bench.setup import Setup
from launch.gpu.figures import Figure, rate, ratio
from launch.gpu.shapes import Shape, qwen2_5_vl_3b, whisper_large_v3

PICTURE_SIDE, TOY_PICTURE_SIDE = 896, 84
CLIP_S, SAMPLE_RATE = 30, 16000
BATCHES: Final = (1, 8)
TOY_BATCHES: Final = (1,)


def measure(setup: Setup) -> list[Figure]:
    """Two rows for each kind of media and batch: ours, and transformers' with the same sizes."""
    side = TOY_PICTURE_SIDE if setup.toy else PICTURE_SIDE
    pictures = _measure(setup, qwen2_5_vl_3b, noise_picture(side), f"{side} x {side}", "pictures/s", 1.0)
    return pictures + _measure(setup, whisper_large_v3, _silence(), f"{CLIP_S} s clips", "s of sound/s", float(CLIP_S))


def _measure(
    setup: Setup, make: Callable[..., Shape], media: bytes, case: str, unit: str, amount: float
) -> list[Figure]:
    info = load_model_info(str(setup.model(make)))
    engine = EncoderEngine(info, EngineConfig(device=setup.device.type, load_format="dummy"))
    processors.init_worker(str(info.folder), str(engine.dtype).removeprefix("torch."))
    item = processors.process(info.media_kind or "", media)
    theirs = _transformers_module(info.folder, engine)
    figures = []
    for batch in TOY_BATCHES if setup.toy else BATCHES:
        inputs = _batched([item] * batch, setup.device, engine.dtype)
        ours_s = setup.time(partial(engine.encoder.encode, [item] * batch))
        theirs_s = setup.time(partial(_run, theirs, inputs))
        label = f"{case}, batch {batch}"
        flops = batch * encoder_flops(engine.encoder.module, item)
        most = batch * amount * setup.limits.matmul_flops_per_s / flops
        beside = f"{ratio(ours_s, theirs_s)} transformers'; copying the inputs included"
        figures.append(rate("encoder", label, unit, ours_s, batch * amount, most, beside))
        figures.append(rate("encoder", f"{label}, transformers", unit, theirs_s, batch * amount, most))
    return figures


def encoder_flops(module: nn.Module, item: ProcessedInput) -> float:
    """Of all matrices over the rows that enter them; attention's own products are left out, for windows differ."""
    rows = len(item.arrays["pixel_values"]) if "pixel_values" in item.arrays else item.shape[0]
    matrices = [(name, parameter.numel()) for name, parameter in module.named_parameters() if parameter.ndim == 2]
    return sum(2.0 * (item.shape[0] if "merger" in name else rows) * size for name, size in matrices)


def _transformers_module(folder: Path, engine: EncoderEngine) -> nn.Module:
    """The same encoder without us: SDPA, random weights of the same sizes."""
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = AutoConfig.from_pretrained(folder)
    picture = getattr(config, "vision_config", None)
    own = picture if picture is not None else config
    own._attn_implementation = "sdpa"
    build = WhisperEncoder if picture is None else Qwen2_5_VisionTransformerPretrainedModel
    with engine.device:
        module: nn.Module = build(own).to(engine.dtype).eval()
    return module


def _batched(items: Sequence[ProcessedInput], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    arrays = [item.arrays for item in items]
    if "input_features" in arrays[0]:
        return {
            "input_features": torch.stack([torch.from_numpy(one["input_features"]) for one in arrays]).to(device, dtype)
        }
    patches = torch.cat([torch.from_numpy(one["pixel_values"]) for one in arrays])
    grids = torch.stack([torch.from_numpy(one["image_grid_thw"]) for one in arrays])
    return {"hidden_states": patches.to(device, dtype), "grid_thw": grids.to(device)}


@torch.inference_mode()
def _run(module: nn.Module, inputs: dict[str, Any]) -> object:
    return module(**inputs)


def _silence() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(SAMPLE_RATE)
        sound.writeframes(bytes(2 * CLIP_S * SAMPLE_RATE))
    return file.getvalue()
