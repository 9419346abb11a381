"""Peak memory of an encoder's largest batch, measured at start with synthetic media.

Images are tried larger and larger until the preprocessor makes no more of them, audio is one window of silence,
texts as long as they may be. What would take long is cut short: layers use the same memory one after the other, of a
batch one item is measured, and the line through smaller images gives the largest, of which only the rows are known.
"""

from __future__ import annotations

import io
import math
import pkgutil
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from PIL import Image

from common.model_info import ModelInfo
from common.text.prompts import encode_tokens, join_media
from engine.device.memory_profiler import PeakMemory, extrapolate, one_layer_of_each_stack, release_free_memory
from engine.media.log_mel import LogMelSettings
from engine.models.base import EncoderModel
from engine.processors import ITEM_BYTES, ProcessedInput, Processor, preprocessor_json

TIME_S: Final = 0.2
"""After this only the first layer is computed to its end, and no image is encoded beyond `LEAST_SIZES`."""
LEAST_SIZES: Final = 3
"""The first one takes what libraries keep, too: what images grow by shows in those after it."""
SIDES: Final = (112, 224, 448, 896, 1792)
"""Of images, in pixels."""
LARGEST_SIDE: Final = 4096
"""Preprocessors make no more of larger images than of this one: Qwen3-VL's limit is its area."""


@dataclass(frozen=True)
class BatchProfile:
    """Peak bytes of a batch beside the weights: the smallest item alone, and the largest batch.

    `num_items` and `item_bytes` (of output) are of the largest batch.
    """

    smallest: int
    largest: int
    num_items: int
    item_bytes: int

    def with_outputs_of_another(self) -> BatchProfile:
        """Return the profile with the outputs of the previous batch still in memory."""
        return replace(self, largest=self.largest + self.num_items * self.item_bytes)

    def bytes_of(self, num_items: int) -> int:
        """Return the bytes of a batch with the given number of largest items."""
        return self.largest * min(num_items, self.num_items) // self.num_items

    def items_within(self, budget: int) -> int:
        """How many of the largest items can share a batch; at least 1."""
        return max(1, min(self.num_items, budget * self.num_items // max(1, self.largest)))


@torch.inference_mode()
def measure_batch(
    encoder: EncoderModel, info: ModelInfo, dtype: torch.dtype, device: torch.device, max_items: int, max_bytes: int
) -> BatchProfile | None:
    """Run the encoder on its largest item; a batch has up to `max_items` items within `max_bytes` of output.

    None where nothing can be measured. Raises what a processor raises whose settings do not fit the model.
    """
    build: Callable[[ModelInfo], Processor] = pkgutil.resolve_name(info.family.processor)
    processor, name = build(info), str(dtype).removeprefix("torch.")

    def make(side: int) -> ProcessedInput:
        arrays, layout, shape = processor(_media(info, side))
        return ProcessedInput(arrays, layout, shape, name, math.prod(shape) * ITEM_BYTES[name])

    most_bytes, most_rows = _extent(make(LARGEST_SIDE))
    most_rows = info.max_encoder_tokens if info.family.reads_text else min(most_rows, info.max_model_len)
    deadline_s = time.monotonic() + TIME_S if device.type == "cpu" else math.inf
    sizes: list[tuple[int, int]] = []
    num_bytes = 0
    for side in SIDES:
        item = make(side)
        if _extent(item)[0] <= num_bytes:
            continue  # small ones are scaled up to the same size
        num_bytes, num_rows = _extent(item)
        with PeakMemory(device) as peak, one_layer_of_each_stack(encoder.module, deadline_s):
            encoder.encode([item])
        if peak.size_bytes is None:
            return None
        sizes.append((num_rows, peak.size_bytes))
        if num_bytes >= most_bytes or (len(sizes) >= LEAST_SIZES and time.monotonic() > deadline_s):
            break
    release_free_memory(device)
    most_rows = max(num_rows, most_rows)
    item_bytes = item.size_bytes * most_rows // num_rows
    num_items = max(1, min(max_items, max_bytes // item_bytes))
    return BatchProfile(sizes[0][1], extrapolate(sizes, most_rows) * num_items, num_items, item_bytes)


def _extent(item: ProcessedInput) -> tuple[int, int]:
    """Return the bytes of the arrays, and the rows of the output."""
    return sum(array.nbytes for array in item.arrays.values()), item.shape[0]


def _media(info: ModelInfo, side: int) -> bytes:
    """Return a medium of the model's kind; `side` is that of images."""
    if info.family.reads_text:
        return join_media([info.placeholder_token_id or 0], _picture(side))
    if info.media_kind == "image":
        return _picture(side)
    if info.media_kind == "audio":
        return _silence(LogMelSettings.from_json(preprocessor_json(info, "feature_extractor")))
    return encode_tokens([1] * info.max_encoder_tokens)


def _picture(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), "grey").save(file, "BMP")
    return file.getvalue()


def _silence(settings: LogMelSettings) -> bytes:
    """Return a window of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(settings.sampling_rate)
        audio.writeframes(bytes(2 * settings.num_samples))
    return file.getvalue()
