"""Images by transformers' own image processor: the fallback for families without one here.

Slower than the others: each preprocessing process imports transformers and torch, some seconds and some 300 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import decode_image


class TransformersImages(ABC):
    """Images as the folder's preprocessor makes them; the family counts the tokens of an image.

    Raises ValueError for a preprocessor that transformers does not know, or that needs torchvision.
    """

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        try:
            self.preprocessor: Any = AutoImageProcessor.from_pretrained(info.folder, backend="pil")
        except (ImportError, OSError) as error:
            raise ValueError(f"transformers cannot make it: {' '.join(str(error).split())}") from error
        self._placeholder = info.placeholder_token_id
        self._width = int(info.text_config["hidden_size"])

    def __call__(self, media: bytes) -> tuple[dict[str, npt.NDArray[Any]], InputLayout, tuple[int, ...]]:
        made = self.preprocessor(images=[decode_image(media)], return_tensors="np")
        arrays = {name: np.asarray(array[0]) for name, array in made.items()}
        num_tokens = self.count_tokens(arrays)
        assert self._placeholder is not None
        return arrays, InputLayout(num_tokens, [(self._placeholder, num_tokens)]), (num_tokens, self._width)

    @abstractmethod
    def count_tokens(self, arrays: dict[str, npt.NDArray[Any]]) -> int:
        """Return the encoder rows of an image, which take the place of its placeholder."""
