"""Qwen3 and Mistral compute what transformers' do; where they go their own way from Llama is covered here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models.dense import decoder_of, logits_of
from tests.engine.models.test_decoders import assert_equal_logits, transformers_logits
from tests.tiny.text import make_qwen3


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True, "tie_word_embeddings": False}, {"head_dim": 16, "num_key_value_heads": 4}],
    ids=["as published", "biases", "without groups"],
)
def test_qwen3_equals_transformers(tmp_path: Path, input_ids: torch.Tensor, overrides: dict[str, Any]) -> None:
    folder = make_qwen3(tmp_path / "model", **overrides)
    assert_equal_logits(logits_of(decoder_of(folder), input_ids), transformers_logits(folder, input_ids))
