"""Weight files that claim tensors and take no space."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from common.model_info import ModelInfo, load_model_info


def model_of(folder: Path, **tensors: int) -> ModelInfo:
    """Signpost's configuration over a sparse weight file: tensors of so many parameters; `__` stands for a dot."""
    header, end = {}, 0
    for name, size in tensors.items():
        begin, end = end, end + 2 * size
        header[name.replace("__", ".")] = {"dtype": "BF16", "shape": [size], "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return dataclasses.replace(load_model_info("signpost"), folder=folder)
