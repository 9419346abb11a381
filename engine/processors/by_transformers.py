"""Images by transformers' own image processor: the fallback for families without one here.

Slower than the others: each preprocessing process imports transformers and torch, some seconds and some 300 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.media.image import decode_image
from engine.processors import Arrays, Prepared


class TransformersImages(ABC):
    """Images as the folder's preprocessor makes them; the family says what an image becomes in the prompt.

    Raises ValueError for a preprocessor that transformers does not know, or that needs torchvision.
    """

    kind = "image"

    def __init__(self, info: ModelInfo) -> None:
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        try:
            self.preprocessor: Any = AutoImageProcessor.from_pretrained(
                info.folder, backend="pil", trust_remote_code=False
            )
        except (ImportError, OSError) as error:
            raise ValueError(f"transformers cannot make it: {' '.join(str(error).split())}") from error
        self.token_id = int(info.config[info.family.placeholder])
        self._width = int(info.text_config["hidden_size"])

    def __call__(self, media: bytes) -> Prepared:
        made = self.preprocessor(images=[decode_image(media)], return_tensors="np")
        arrays = {name: np.asarray(array[0]) for name, array in made.items()}
        layout = self.layout_of(arrays)
        return arrays, layout, (layout.num_encoder_tokens, self._width)

    @abstractmethod
    def layout_of(self, arrays: Arrays) -> InputLayout:
        """Return the tokens that take the place of an image's placeholder, and the encoder's rows for the image."""
