"""Encoders: pictures and seconds of sound per second, beside transformers' own module with PyTorch's attention.

Ours twice: with the attention that serves, which on a GPU is FlashInfer's for heads of 64 and 128 and PyTorch's,
sequences of a length together, for others (the pictures' 80); and with PyTorch's as transformers calls it.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from common.config import EngineConfig
from common.model_info import ModelInfo, load_model_info
from engine import processors
from engine.core.encoder_engine import EncoderEngine
from engine.processors import ProcessedInput
from tools.bench.gpu.attention import THEIRS, of_encoder
from tools.bench.gpu.figures import Figure, rate, ratio
from tools.bench.gpu.setup import Setup, attempted, noise_image
from tools.gpu_check.shapes import Shape, qwen2_5_vl_3b, whisper_large_v3

PICTURE_SIDE, TOY_PICTURE_SIDE = 896, 84
CLIP_S, SAMPLE_RATE = 30, 16000
BATCHES: Final = (1, 8)
TOY_BATCHES: Final = (1,)
_LIMIT: Final = "the limit leaves attention out"


def measure(setup: Setup) -> Iterator[Figure]:
    """Three rows for each kind of media and batch: ours, ours with PyTorch's attention, and transformers'."""
    side = TOY_PICTURE_SIDE if setup.toy else PICTURE_SIDE
    pictures = Work(qwen2_5_vl_3b, noise_image(side), f"{side} x {side}", "pictures/s", 1.0)
    clips = Work(whisper_large_v3, _silence(), f"{CLIP_S} s clips", "s of sound/s", float(CLIP_S))
    for work in (pictures, clips):
        yield from attempted("encoder", work.case, _measure, setup, work)


@dataclass(frozen=True)
class Work:
    """One kind of media; each item is `amount` of `unit`."""

    make: Callable[..., Shape]
    media: bytes
    case: str
    unit: str
    amount: float


def _measure(setup: Setup, work: Work) -> Iterator[Figure]:
    info = load_model_info(str(setup.model(work.make)))
    ours, plain = (_engine(setup, info, backend) for backend in ("auto", "torch"))
    processors.init_worker(str(info.folder), str(ours.dtype).removeprefix("torch."))
    item = processors.process(info.media_kind or "", work.media)
    theirs = _transformers_module(info.folder, ours)
    for batch in TOY_BATCHES if setup.toy else BATCHES:
        inputs = _batched([item] * batch, setup.device, ours.dtype)
        ours_s, plain_s = (setup.time(partial(one.encoder.encode, [item] * batch)) for one in (ours, plain))
        theirs_s = setup.time(partial(_run, theirs, inputs))
        case, amount = f"{work.case}, batch {batch}", batch * work.amount
        flops = batch * encoder_flops(ours.encoder.module, item)
        most = amount * setup.limits.matmul_flops_per_s / flops
        beside = f"{ratio(ours_s, theirs_s)} transformers'; copying the inputs included; {_LIMIT}"
        yield of_encoder(ours).of(rate("encoder", case, work.unit, ours_s, amount, most, beside))
        beside = f"{ratio(plain_s, theirs_s)} transformers'; {_LIMIT}"
        own = rate("encoder", f"{case}, PyTorch's attention", work.unit, plain_s, amount, most, beside)
        yield of_encoder(plain).of(own)
        yield THEIRS.of(rate("encoder", f"{case}, transformers", work.unit, theirs_s, amount, most, _LIMIT))


def _engine(setup: Setup, info: ModelInfo, attention_backend: str) -> EncoderEngine:
    config = EngineConfig(device=setup.device.type, load_format="dummy", attention_backend=attention_backend)
    return EncoderEngine(info, config)


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
