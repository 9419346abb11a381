"""Peak memory of an encoder's largest batch, measured at start with synthetic media.

Images and clips are tried larger and larger until the preprocessor takes no more, texts are as long as they may be.
What would take long is cut short: layers use the same memory one after the other, of a batch one item is measured, and
the line through smaller media gives the largest, of which only the rows are known.
"""

from __future__ import annotations

import io
import math
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

import torch
from PIL import Image

from common.model_info import ModelInfo
from common.text.prompts import encode_tokens, join_media
from engine.device.memory_profiler import PeakMemory, extrapolate, one_layer_of_each_stack, release_free_memory
from engine.media.log_mel import LogMelSettings
from engine.models.base import EncoderModel
from engine.processors import ITEM_BYTES, AudioProcessor, ProcessedInput, Processor, make_processor

TIME_S: Final = 0.2
"""After this only the first layer is computed to its end, and nothing is encoded beyond `LEAST_SIZES`."""
LEAST_SIZES: Final = 3
"""The first one takes what libraries keep, too: how much memory grows shows in those after it."""
MOST_SIZES: Final = 5
"""Where time does not matter: an image of 16 million pixels is never encoded."""
SIDES: Final = (112, 224, 448, 896, 1792, 4096)
"""Of images, in pixels. Preprocessors make no more of larger ones: Qwen3-VL's limit is the area of the last."""
SECONDS: Final = (5, 10, 30, 120, 480)
"""Of clips, for preprocessors that take more than a window."""


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

    None where nothing can be measured. Raises as `make_processor` does.
    """
    processor, name = make_processor(info), str(dtype).removeprefix("torch.")

    def make(media: bytes) -> ProcessedInput:
        arrays, layout, shape = processor(media)
        return ProcessedInput(arrays, layout, shape, name, math.prod(shape) * ITEM_BYTES[name])

    media = _media(info, processor)
    most_bytes, most_rows = _extent(make(media[-1]()))
    most_rows = info.max_encoder_tokens if info.family.reads_text else min(most_rows, info.max_model_len)
    deadline_s = time.monotonic() + TIME_S if device.type == "cpu" else math.inf
    sizes: list[tuple[int, int]] = []
    num_bytes = 0
    for medium in media[:MOST_SIZES]:
        item = make(medium())
        if _extent(item)[0] <= num_bytes:
            continue  # small images are scaled up to the same size
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
    return item.array_bytes, item.shape[0]


def _media(info: ModelInfo, processor: Processor) -> list[Callable[[], bytes]]:
    """Return makers of media of the model's kind, from small ones to the largest."""
    if info.family.reads_text:
        return [lambda: join_media([info.placeholder_token_id or 0], _picture(SIDES[0]))]
    if info.media_kind == "image":
        return [partial(_picture, side) for side in SIDES]
    if info.media_kind == "audio":
        settings = LogMelSettings.from_json(info.preprocessor)
        longest = cast(AudioProcessor, processor).max_seconds
        shorter = SECONDS if longest > settings.chunk_length else ()
        return [partial(_silence, settings.sampling_rate, int(seconds)) for seconds in (*shorter, longest)]
    return [lambda: encode_tokens([1] * info.max_encoder_tokens)]


def _picture(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), "grey").save(file, "BMP")
    return file.getvalue()


def _silence(sampling_rate: int, seconds: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(sampling_rate)
        audio.writeframes(bytes(2 * sampling_rate * seconds))
    return file.getvalue()
