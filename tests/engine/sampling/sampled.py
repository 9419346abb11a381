"""Sequences and a model for tests of the sampler, which needs neither weights nor a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.families import find_family
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.sampling.sampler import Sampler

VOCAB_SIZE = 60
EOS = 2


@dataclass
class SequenceUnderTest:
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int = 0
    sampler_state: object | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def make_sequence(
    prompt: Sequence[int] = (1,), output: Sequence[int] = (), seed: int = 0, **sampling: Any
) -> SequenceUnderTest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **sampling})
    return SequenceUnderTest([*prompt, *output], len(prompt), params.validate(), seed)


def make_info(folder: Path, *, vocab_size: int = VOCAB_SIZE, eos: Sequence[int] = (EOS,)) -> ModelInfo:
    config = {"vocab_size": vocab_size}
    family = find_family("LlamaForCausalLM")
    return ModelInfo(folder, "tiny", "LlamaForCausalLM", family, config, {"eos_token_id": list(eos)}, {})


def make_sampler(vocab_size: int = VOCAB_SIZE, eos: Sequence[int] = (EOS,)) -> Sampler:
    return Sampler(make_info(Path("nowhere"), vocab_size=vocab_size, eos=eos), vocab_size)
