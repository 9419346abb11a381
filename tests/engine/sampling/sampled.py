"""Sequences and a model for tests of the sampler, which needs no weights."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

from common.families import find_family
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.state.request import Request, Sequence

VOCAB_SIZE = 60
EOS = 2


def make_sequence(prompt: ListOf[int] = (1,), output: ListOf[int] = (), seed: int = 0, **sampling: Any) -> Sequence:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **sampling})
    [sequence] = Request("r", list(prompt), [], sampling=params.validate(), arrival=0, seed=seed).sequences
    sequence.token_ids += output
    return sequence


def make_info(folder: Path, *, vocab_size: int = VOCAB_SIZE, eos: ListOf[int] = (EOS,)) -> ModelInfo:
    config = {"vocab_size": vocab_size}
    family = find_family("LlamaForCausalLM")
    return ModelInfo(folder, "tiny", "LlamaForCausalLM", family, config, {"eos_token_id": list(eos)}, {})


def make_sampler(vocab_size: int = VOCAB_SIZE, eos: ListOf[int] = (EOS,)) -> Sampler:
    return Sampler(make_info(Path("nowhere"), vocab_size=vocab_size, eos=eos), vocab_size)
