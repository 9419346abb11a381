"""The dtype that an engine chooses for a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from common.model_info import load_model_info
from engine.device.choice import choose_dtype


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}, torch.float16),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, torch.float16),
        ({}, {"dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, {"dtype": "float16"}, torch.bfloat16),
        ({}, {}, torch.bfloat16),
    ],
)
def test_the_dtype_of_the_whole_checkpoint_goes_before_that_of_its_text_part(
    outer: dict[str, str], inner: dict[str, str], expected: torch.dtype
) -> None:
    info = load_model_info("signpost")
    config: dict[str, Any] = {key: value for key, value in info.config.items() if not key.endswith("dtype")}
    text = {key: value for key, value in info.config["text_config"].items() if not key.endswith("dtype")}
    info = replace(info, config={**config, **outer, "text_config": {**text, **inner}})
    assert choose_dtype("auto", torch.device("cuda"), info) is expected
