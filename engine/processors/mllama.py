"""Images of Mllama (Llama 3.2 Vision): up to four tiles of equal size, and a single prompt token per image."""

from __future__ import annotations

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.processors import Arrays
from engine.processors.by_transformers import TransformersImages


class MllamaProcessor(TransformersImages):
    """The encoder outputs rows for the greatest number of tiles; rows of real tiles come first, the only rows visible
    to later text."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        vision, size = info.config["vision_config"], self.preprocessor.size
        ours = (size["height"], size["width"], self.preprocessor.max_image_tiles)
        side, self._max_tiles = int(vision.get("image_size", 448)), int(vision.get("max_num_tiles", 4))
        if ours != (side, side, self._max_tiles):
            raise ValueError(
                f"the preprocessor of {info.name} makes up to {ours[2]} tiles of {ours[0]} x {ours[1]} pixels, "
                f"its encoder takes {self._max_tiles} of {side} x {side}"
            )
        self._num_rows = info.max_encoder_tokens

    def layout_of(self, arrays: Arrays) -> InputLayout:
        visible = int(arrays["num_tiles"].item()) * (self._num_rows // self._max_tiles)
        return InputLayout(self._num_rows, [(self.token_id, 1)], num_visible_tokens=visible)
