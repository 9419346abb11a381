"""Peak memory of an encoder's largest batch, measured at start with synthetic media.

Images are tried larger and larger until the preprocessor makes no more of them, audio is one window of silence,
texts as long as they may be. What would take long is cut short: layers use the same memory one after the other, of a
batch one item is measured, and of the largest images only the preprocessor's rows.
"""

from __future__ import annotations

import io
import math
import pkgutil
import time
import wave
from collections.abc import Callable, Iterator
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
MOST_SIZES: Final = 5
"""Images that are encoded even where time does not matter."""
SIDES: Final = (112, 224, 448, 896, 1792, 4096)
"""Of images, in pixels: preprocessors make no more of larger ones (Qwen3-VL of up to 4096 by 4096)."""


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
    deadline_s = time.monotonic() + TIME_S if device.type == "cpu" else math.inf
    build: Callable[[ModelInfo], Processor] = pkgutil.resolve_name(info.family.processor)
    processor, name = build(info), str(dtype).removeprefix("torch.")
    sizes: list[tuple[int, int]] = []
    item = largest = None
    for media in _media(info):
        arrays, layout, shape = processor(media)
        made = ProcessedInput(arrays, layout, shape, name, math.prod(shape) * ITEM_BYTES[name])
        if largest is not None and _array_bytes(made) <= _array_bytes(largest):
            break
        largest = made
        if len(sizes) < LEAST_SIZES or (len(sizes) < MOST_SIZES and time.monotonic() < deadline_s):
            item = made
            with PeakMemory(device) as peak, one_layer_of_each_stack(encoder.module, deadline_s):
                encoder.encode([item])
            if peak.size_bytes is None:
                return None
            sizes.append((item.shape[0], peak.size_bytes))
        elif made.shape[0] >= info.max_model_len:  # more rows than a prompt takes
            break
    release_free_memory(device)
    assert item is not None
    assert largest is not None
    most_rows = info.max_encoder_tokens if info.family.reads_text else min(largest.shape[0], info.max_model_len)
    num_rows = max(item.shape[0], most_rows)
    item_bytes = item.size_bytes * num_rows // item.shape[0]
    num_items = max(1, min(max_items, max_bytes // item_bytes))
    return BatchProfile(sizes[0][1], extrapolate(sizes, num_rows) * num_items, num_items, item_bytes)


def _array_bytes(item: ProcessedInput) -> int:
    return sum(array.nbytes for array in item.arrays.values())


def _media(info: ModelInfo) -> Iterator[bytes]:
    if info.family.reads_text:
        yield join_media([info.placeholder_token_id or 0], _picture(SIDES[0]))
    elif info.media_kind == "image":
        yield from map(_picture, SIDES)
    elif info.media_kind == "audio":
        yield _silence(LogMelSettings.from_json(preprocessor_json(info, "feature_extractor")))
    else:
        yield encode_tokens([1] * info.max_encoder_tokens)


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
