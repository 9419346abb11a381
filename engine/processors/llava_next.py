"""Images of LLaVA-NeXT (LLaVA-1.6): the whole, and tiles of a grid that fits the image's shape."""

from __future__ import annotations

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.processors import Arrays
from engine.processors.by_transformers import TransformersImages
from engine.processors.llava import CLASS_TOKENS


class LlavaNextProcessor(TransformersImages):
    """A row per patch of the whole image, a row per patch of the tiles without their padding, and one for each line."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        vision = info.config["vision_config"]
        self._side = int(vision.get("image_size", 336)) // int(vision.get("patch_size", 14))
        cropped = info.config.get("vision_feature_select_strategy", "default") == "default"
        self._extra = CLASS_TOKENS[str(vision.get("model_type", "clip_vision_model"))] - cropped

    def layout_of(self, arrays: Arrays) -> InputLayout:
        from transformers.image_processing_utils import select_best_resolution

        height, width = (int(side) for side in arrays["image_sizes"])
        tile = int(arrays["pixel_values"].shape[-1])
        best: tuple[int, int] = select_best_resolution((height, width), self.preprocessor.image_grid_pinpoints)
        rows, columns = (self._side * (side // tile) for side in best)
        # Padding is cut off again, the same on both sides, with the rounding of transformers.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        num_tokens = int(self._side**2 + self._extra + rows * columns + rows)
        return InputLayout(num_tokens, [(self.token_id, num_tokens)])
