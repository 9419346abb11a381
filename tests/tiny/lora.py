"""LoRA adapters of tiny models, in PEFT's format, and the models with an adapter merged into their weights."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.tiny_models import write_json

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_NOT_OF_DECODERS = re.compile("visual|vision|audio|projector|connector")


def make_adapter(
    folder: Path, model: nn.Module, targets: tuple[str, ...], *, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """Write a random adapter of a model of transformers; `config` goes to adapter_config.json.

    `rank_pattern` is read as PEFT reads it: the last matching part of a name counts.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    ranks: dict[str, int] = config.get("rank_pattern") or {}
    for name, layer in _targets(model, targets):
        r = next((r for key, r in ranks.items() if name.endswith(key)), rank)
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(r, layer.in_features, generator=generator) / 4
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(layer.out_features, r, generator=generator) / 4
    return write_adapter(folder, tensors, r=rank, target_modules=list(targets), **config)


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write a folder as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}
    write_json(folder / "adapter_config.json", {**usual, **config})
    return folder


def merged(model: nn.Module, folder: Path, config: dict[str, Any]) -> nn.Module:
    """Return a copy of the model with W + alpha / r * B A in place of W."""
    model, tensors = copy.deepcopy(model), load_file(folder / "adapter_model.safetensors")
    alphas: dict[str, float] = config.get("alpha_pattern") or {}
    for key, down in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        alpha = next((alpha for key, alpha in alphas.items() if name.endswith(key)), config.get("lora_alpha", 8))
        factor = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight += factor * tensors[key.replace("lora_A", "lora_B")] @ down
    return model


def _targets(model: nn.Module, targets: tuple[str, ...]) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(targets) and not _NOT_OF_DECODERS.search(name):
            yield name, layer
