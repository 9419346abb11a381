"""Vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, images of any sizes in one batch.

The modules are transformers' own, except attention and, in Qwen2.5-VL, norms and MLPs: kernels of
`engine.models.layers` compute rotations, norms and gates in one pass each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from engine.device.h2d import send_tensor
from engine.models.base import CheckpointLayout, EncoderModel
from engine.models.layers import RMSNorm, linear, rotate, silu_mul
from engine.processors import ProcessedInput

_NORM_EPS: Final = 1e-6


class GatedMLP(nn.Module):
    """[n, size] -> [n, size] with SwiGLU, its two products in one."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(size, 2 * intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu_mul(self.gate_up_proj(hidden)))
        return output


class VisionAttention(nn.Module):
    """Attention within images or windows that lie end to end, by the attention function that `config` names.

    transformers' own rotates in ten passes, and calls the function once for each window.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.config = theirs.qkv, theirs.proj, theirs.config
        self.num_heads, self.head_dim = theirs.num_heads, theirs.head_dim

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """hidden_states [n, size], cu_seqlens [m + 1]; cosines and sines [n, head_dim] -> [n, size]"""
        heads = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        cosines, sines = (table[:, None] for table in position_embeddings)
        sines = torch.cat((-sines[..., : self.head_dim // 2], sines[..., self.head_dim // 2 :]), -1)
        rotated = rotate(heads[:, :2].flatten(1, 2), cosines, sines).view(len(heads), 2, *heads.shape[2:])
        name = self.config._attn_implementation
        in_one = "flash" in name
        more = {"cu_seq_lens_q": cu_seqlens} if in_one else {}
        attended, begin = [], 0
        for length, equal in groupby([len(heads)] if in_one else cu_seqlens.diff().tolist()):
            count = len(list(equal))
            rows = slice(begin, begin := begin + count * length)
            parts = (x[rows].unflatten(0, (count, length)) for x in (rotated[:, 0], rotated[:, 1], heads[:, 2]))
            query, key, value = (x.transpose(1, 2) for x in parts)
            out, _ = ALL_ATTENTION_FUNCTIONS[name](self, query, key, value, None, is_causal=False, **more)
            attended.append(out.flatten(0, 1))
        output: Tensor = self.proj(torch.cat(attended).flatten(1))
        return output


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
        self._config._attn_implementation = "sdpa"  # until a kernel takes its place, whatever config.json says
        blocks: Any = self.module.get_submodule("blocks")
        for block in blocks:
            block.attn = VisionAttention(block.attn)
        self._merge_unit = self._config.spatial_merge_size**2

    def finish_loading(self, device: torch.device) -> None:
        # Its rotary frequencies are in no checkpoint: computed anew, on real memory.
        with torch.device("cpu"):
            rotary = type(self.module.get_submodule("rotary_pos_emb"))(self._config)
        self.module.register_module("rotary_pos_emb", rotary.to(device))
        # A patch lies in a row: its convolution is a matrix product, which PyTorch computes in a quarter of the time.
        patches: Any = self.module.get_submodule("patch_embed")
        patches.forward = lambda pixels: linear(pixels, patches.proj.weight.flatten(1), patches.proj.bias)

    def encode(self, items: Sequence[ProcessedInput]) -> list[Tensor]:
        parts = []
        for item in items:
            part = item.arrays["pixel_values"]
            if (tables := item.arrays.get("values")) is not None:  # of the bytes of a video
                patches, part = part, np.empty(part.shape, np.float32)
                for channel, table in enumerate(tables):
                    part[:, channel] = table[patches[:, channel]]
            parts.append(part.reshape(len(part), -1))
        pixels = self.send(np.concatenate(parts) if len(parts) > 1 else parts[0])
        grids = np.stack([item.arrays["image_grid_thw"] for item in items])
        sizes = torch.from_numpy(grids)
        output = self.module(
            pixels,
            grid_thw=send_tensor(sizes, pixels.device, sizes.dtype),
            **self.layout_of(sizes, pixels.device),
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

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = self._config.hidden_size
        blocks: Any = self.module.get_submodule("blocks")
        for block in blocks:
            block.norm1, block.norm2 = RMSNorm(size, _NORM_EPS), RMSNorm(size, _NORM_EPS)
            if self._config.hidden_act in ("silu", "swish"):
                block.mlp = GatedMLP(size, self._config.intermediate_size)

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
