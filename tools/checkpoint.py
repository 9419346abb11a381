"""The folder of a trained model, as transformers and Triptych load it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def save_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, **tokenizer_config: str
) -> None:
    """Write weights in bfloat16 and the tokenizer; `tokenizer_config` are classes as older versions call them."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config, indent=1) + "\n")
