"""The same requests for every system, and never twice the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import TriptychError
from tests import tiny_models
from tests.weights.fixtures import smollm2, whisper_tiny_en
from tools.bench.measure import Schedule, System, measure
from tools.bench.systems import LLMSystem
from tools.bench.transformers_system import TransformersSystem
from tools.bench.workloads import TOKENS_IN, make_workload

__all__ = ["smollm2", "whisper_tiny_en"]


def test_requests_repeat_for_a_seed_and_differ_between_seeds_and_requests() -> None:
    workload = make_workload("signpost")
    first, again, other = (workload.requests(5, seed) for seed in (1, 1, 2))
    assert first == again
    assert len({request.pictures for request in first + other}) == 10


@pytest.mark.weights
def test_prompts_have_their_length_as_text_too(smollm2: Path) -> None:
    prompts = [request.prompt_token_ids for request in make_workload(str(smollm2)).requests(3, 0)]
    assert [len(prompt) for prompt in prompts] == [TOKENS_IN] * 3


@pytest.mark.weights
def test_no_two_clips_have_the_same_bytes(whisper_tiny_en: Path) -> None:
    one, other = make_workload(str(whisper_tiny_en)).requests(2, 0)
    assert one.clip != other.clip
    assert one.prompt_token_ids == other.prompt_token_ids


def test_a_model_without_words_is_refused(tmp_path: Path) -> None:
    workload = make_workload(str(tiny_models.make_llama(tmp_path / "bytes")))
    with pytest.raises(TriptychError, match="only 0 whole words"):
        workload.requests(1, 0)


def test_llm_and_transformers_answer_a_measured_turn_alike() -> None:
    import torch

    workload = make_workload("signpost")
    systems: list[System] = [
        TransformersSystem(workload.info, torch.float32, 1),
        LLMSystem(workload.info, "float32", 1),
    ]
    turns = measure(workload, systems, Schedule([1, 3], repetitions=1, requests_per_turn=3), lambda _: None)
    assert [(turn.system, turn.in_flight, len(turn.outcomes)) for turn in turns] == [
        (system.name, in_flight, 3) for in_flight in (1, 3) for system in systems
    ]
    for theirs, ours in zip(turns[::2], turns[1::2], strict=True):
        assert [outcome.text for outcome in ours.outcomes] == [outcome.text for outcome in theirs.outcomes]
        assert [outcome.num_tokens for outcome in ours.outcomes] == [outcome.num_tokens for outcome in theirs.outcomes]
        assert all(0 < (outcome.ttft_s or 0) <= outcome.latency_s for outcome in ours.outcomes + theirs.outcomes)
