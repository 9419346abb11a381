"""A plugin that runs any tests of engines on the GPU in float32, where tokens are those of transformers on a CPU:

    python -m pytest -p tests.gpu.in_float32 -n 6 tests/equality/llm tests/equality/clusters/test_more_families.py

Every family then takes the paths of CUDA beside FlashInfer: Triton's layers, PyTorch's attention, graphs of decodes,
steps ahead, KV from GPU to GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from common.config import EngineConfig
from tests.gpu.device import DEVICE

DEFAULTS: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "memory_fraction": 0.04}
"""Several processes share the GPU."""

_init = EngineConfig.__init__


def _init_for_gpu(self: EngineConfig, **options: Any) -> None:
    _init(self, **{**DEFAULTS, **options})


EngineConfig.__init__ = _init_for_gpu  # type: ignore[method-assign]
torch.backends.cudnn.allow_tf32 = False
