"""The device of the tests here: CUDA, or what TEST_DEVICE says, to rehearse them on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
