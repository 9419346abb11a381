"""Media to encoder inputs, in the process pool of an encoder worker and in `LLM`.

Not here: damage and formats of media (engine.media), encoders (engine.encoders), torch. May import engine.media, and
`common`.

A process of the pool calls `init_worker` once, then `process` per item; `LLM` has a `Preprocessor` of its own. What an
item will be as encoder output (its tokens, its bytes) is known here, before the encoder has run: that is what an
encoder offers.
"""

from __future__ import annotations

import math
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy.typing as npt

from common.errors import TriptychError
from common.messages import InputLayout
from common.model_info import ModelInfo, load_model_info

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
"""By transformers' names, without a batch dimension."""
Prepared: TypeAlias = tuple[Arrays, InputLayout, tuple[int, ...]]
"""The inputs of the encoder, what they become in the prompt, and the shape of the encoder's output."""


@dataclass
class ProcessedInput:
    """A media item, ready for the encoder. `shape` [num_encoder_tokens, hidden_size], `dtype` and `size_bytes` describe
    the encoder's output; `arrays` are the inputs."""

    arrays: Arrays
    layout: InputLayout
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    @property
    def array_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class Processor(Protocol):
    """Media of a model: bytes to the encoder's inputs, the layout and the output's shape."""

    kind: str

    def __call__(self, media: bytes) -> Prepared: ...


class AudioProcessor(Processor, Protocol):
    """A processor of clips of up to `max_seconds`."""

    max_seconds: float


def make_processor(info: ModelInfo, path: str = "") -> Processor:
    """Return a model's processor, or the one at `path`.

    Raises TriptychError: "invalid_request" for a text model, "model_not_found" where the preprocessor's settings are
    incomplete, unsupported, or do not fit the encoder.
    """
    if info.media_kind is None:
        raise TriptychError("invalid_request", f"{info.name} is a text model: it takes no media", "model")
    build: Callable[[ModelInfo], Processor] = pkgutil.resolve_name(path or info.family.processor)
    try:
        return build(info)
    except (ValueError, TypeError, LookupError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        message = f"the preprocessor of {info.folder} cannot be used: {why}"
        raise TriptychError("model_not_found", message, "model") from error


class Preprocessor:
    """The processors of a model; `dtype` is the encoder output's, such as "float32".

    Raises ValueError where the dtype is unknown, and TriptychError as `make_processor`.
    """

    def __init__(self, info: ModelInfo, dtype: str) -> None:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        made = [make_processor(info), *([make_processor(info, info.family.video)] if info.family.video else [])]
        self._info, self._dtype = info, dtype
        self._processors = {processor.kind: processor for processor in made}

    def __call__(self, kind: str, media: bytes) -> ProcessedInput:
        """Decode and preprocess a media item.

        Raises TriptychError: "bad_media" saying what is wrong with it, "invalid_request" for a kind that the model does
        not take.
        """
        if kind not in self._processors:
            message = f"{self._info.name} takes {' and '.join(self._processors)}, not {kind}"
            raise TriptychError("invalid_request", message, "messages")
        arrays, layout, shape = self._processors[kind](media)
        return ProcessedInput(arrays, layout, shape, self._dtype, math.prod(shape) * ITEM_BYTES[self._dtype])


_worker: Preprocessor | None = None


def init_worker(model: str, dtype: str) -> None:
    """Load a model's processors into this process of a pool, for `process`."""
    global _worker
    _worker = Preprocessor(load_model_info(model), dtype)
    if multiprocessing.parent_process() is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the pool is the parallelism; the engine beside it needs the cores


def process(kind: str, media: bytes) -> ProcessedInput:
    """Preprocess a media item as the `Preprocessor` of this process does."""
    if _worker is None:
        raise RuntimeError("process was called before init_worker")
    return _worker(kind, media)
