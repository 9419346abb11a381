"""Media in, encoder inputs out: what runs in the process pool of an encoder worker."""

from dataclasses import dataclass

import numpy as np

from common.messages import InputLayout


@dataclass
class ProcessedInput:
    """One media item ready for the encoder; shape, dtype and size are those of the encoder's output."""

    arrays: dict[str, np.ndarray]
    layout: InputLayout
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
