"""Vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: transformers' own modules, images of any sizes in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from engine.device.h2d import send_tensor
from engine.models.base import CheckpointLayout, EncoderModel
from engine.processors import ProcessedInput


class QwenVisionEncoder(EncoderModel):
    """Images laid end to end; the tower attends within each image, and within windows if the model has windows."""

    layout = CheckpointLayout(prefixes={"visual.": "", "model.visual.": ""})
    tower: type[nn.Module]
    """transformers' own class."""
    has_deepstack = False
    """Whether outputs of deeper layers stand beside the last output, in further columns."""

    def __init__(self, config: Any) -> None:
        self._config = config.vision_config
        self.module = self.unmasked = self.tower(self._config)
        self._merge_unit = self._config.spatial_merge_size**2

    def finish_loading(self, device: torch.device) -> None:
        # Its rotary frequencies are in no checkpoint: computed anew, on real memory.
        with torch.device("cpu"):
            rotary = type(self.module.get_submodule("rotary_pos_emb"))(self._config)
        self.module.register_module("rotary_pos_emb", rotary.to(device))
        # A patch lies in a row: its convolution is a matrix product, which PyTorch computes in a quarter of the time.
        patches: Any = self.module.get_submodule("patch_embed")
        patches.forward = lambda pixels: F.linear(pixels, patches.proj.weight.flatten(1), patches.proj.bias)

    @torch.inference_mode()
    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        weight = next(self.module.parameters())
        parts = []
        for item in items:
            part = item.arrays["pixel_values"]
            if (tables := item.arrays.get("values")) is not None:  # of the bytes of a video
                patches, part = part, np.empty(part.shape, np.float32)
                for channel, table in enumerate(tables):
                    part[:, channel] = table[patches[:, channel]]
            parts.append(part.reshape(len(part), -1))
        pixels = np.concatenate(parts) if len(parts) > 1 else parts[0]
        grids = np.stack([item.arrays["image_grid_thw"] for item in items])
        sizes = torch.from_numpy(grids)
        output = self.module(
            send_tensor(torch.from_numpy(pixels), weight.device, weight.dtype),
            grid_thw=send_tensor(sizes, weight.device, sizes.dtype),
            **self.layout_of(sizes, weight.device),
        )
        rows: Tensor = output.pooler_output
        if self.has_deepstack:
            rows = torch.cat((rows, *output.deepstack_features), dim=-1)
        return list(torch.split(rows, (grids.prod(-1) // self._merge_unit).tolist()))

    def layout_of(self, sizes: Tensor, device: torch.device) -> dict[str, Any]:
        """Compute the tower's layout from image sizes, [n, 3] on the host. From the device the tower would fetch sizes
        separately, waiting each time; attention reads the boundaries on the host, too."""
        positions = get_vision_position_ids(sizes, self._config.spatial_merge_size)
        starts = get_vision_cu_seqlens(sizes)
        return {
            "position_ids": send_tensor(positions, device, positions.dtype),
            "cu_seqlens": starts,
            "max_seqlen": int(starts.diff().max()),
        }


class Qwen2VLEncoder(QwenVisionEncoder):
    tower = Qwen2VisionTransformerPretrainedModel


class Qwen2_5_VLEncoder(QwenVisionEncoder):
    tower = Qwen2_5_VisionTransformerPretrainedModel

    def layout_of(self, sizes: Tensor, device: torch.device) -> dict[str, Any]:
        config = self._config
        order, starts = get_vision_window_index(sizes, config.spatial_merge_size, config.window_size, config.patch_size)
        windows = {
            "window_index": send_tensor(order, device, order.dtype),
            "cu_window_seqlens": starts,
            "max_window_seqlen": int(starts.diff().max()),
        }
        return super().layout_of(sizes, device) | windows


class Qwen3VLEncoder(QwenVisionEncoder):
    """Each row holds the tower's last output, followed by outputs of the layers in `deepstack_visual_indexes`."""

    tower = Qwen3VLVisionModel
    has_deepstack = True
