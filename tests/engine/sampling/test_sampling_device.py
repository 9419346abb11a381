"""What is chosen without waiting for the device is what the host would choose, token for token."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling_params import MIN_TEMPERATURE, SamplingParams
from engine.sampling.device_draw import draw_on_device, nucleus_by_flashinfer, nucleus_by_sorting, unless_it_fails
from engine.sampling.draw import CANDIDATES, draw, uniform
from engine.sampling.sampler import choose_on_device
from tests.engine.sampling.sampled import make_sampler, make_sequence
from tests.fake_flashinfer.installed import flashinfer_on_cpu

LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k of more than there are": {"top_k": 100_000},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "cold": {"temperature": MIN_TEMPERATURE},
    "hot": {"temperature": 2.0, "top_p": 0.95},
}
NUMBERS = [0.0, 1.0 - 2.0**-52, *(uniform(7, position) for position in range(30))]


def logits_of(kind: str, vocab_size: int) -> torch.Tensor:
    """[vocab_size]: drawn, with the ties that bfloat16 makes, all alike, one above all, or with most forbidden."""
    drawn = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    if kind == "ties":
        return drawn.bfloat16().float().round()
    if kind == "flat":
        return torch.zeros(vocab_size)
    if kind == "peaked":
        return drawn.index_fill(0, torch.tensor([vocab_size // 2]), 60.0)
    if kind == "forbidden":
        return drawn.index_fill(0, torch.arange(vocab_size)[torch.arange(vocab_size) % 7 != 3], -torch.inf)
    return drawn


@pytest.mark.parametrize("kind", ["drawn", "ties", "flat", "peaked", "forbidden"])
@pytest.mark.parametrize("vocab_size", [40, 3 * CANDIDATES[-1] + 5])
def test_the_device_draws_what_the_host_draws(kind: str, vocab_size: int) -> None:
    """Every limit in every row's turn, beside all others."""
    logits = logits_of(kind, vocab_size)
    rows = [SamplingParams(**limits) for limits in LIMITS.values() for _ in NUMBERS]
    numbers = NUMBERS * len(LIMITS)
    scores = logits.expand(len(rows), -1)
    assert draw_on_device(scores, rows, numbers).tolist() == draw(scores, rows, numbers)


@given(st.integers(0, 2**32), st.lists(st.sampled_from(sorted(LIMITS)), min_size=1, max_size=6), st.floats(0.05, 6.0))
@settings(max_examples=40, derandomize=True)
def test_rows_of_any_scores_and_limits_draw_the_same(seed: int, names: list[str], scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((len(names), 700), generator=generator) * scale
    rows = [SamplingParams(**LIMITS[name]) for name in names]
    numbers = [uniform(seed, position) for position in range(len(names))]
    together = draw_on_device(scores, rows, numbers).tolist()
    assert together == draw(scores, rows, numbers)
    alone = [draw_on_device(scores[[i]], [rows[i]], [numbers[i]]).item() for i in range(len(names))]
    assert together == alone


def test_ties_beyond_top_k_count_for_the_nucleus() -> None:
    """All 2999 equal tokens are the second likeliest: the first, one of eleven parts, is not half of what is left."""
    logits = torch.zeros(3000)
    logits[0] = math.log(300)
    rows = [SamplingParams(top_k=2, top_p=0.5)] * 2
    first, second = draw_on_device(logits.expand(2, -1), rows, [0.05, 0.5]).tolist()
    assert first == 0
    assert second > 1000


def test_greedy_and_random_sequences_mix() -> None:
    sequences = [
        make_sequence(temperature=temperature, seed=seed, output=[5] * seed, top_k=top_k)
        for seed, (temperature, top_k) in enumerate([(0.0, 0), (1.0, 0), (0.8, 9), (1.5, 1), (0.0, 3), (2.0, 0)])
    ]
    for chosen in (sequences, sequences[1:3], sequences[:1]):
        logits = torch.randn((len(chosen), 60), generator=torch.Generator().manual_seed(3))
        logits[0, [7, 30]] = 50.0  # of equals, the first
        expected = [sampled.token_id for sampled in make_sampler().sample(logits.clone(), chosen)]
        assert choose_on_device(logits, chosen).tolist() == expected
        assert [one.token_id for one in make_sampler().launch(logits, chosen).wait()] == expected


def test_kernels_that_do_not_run_are_done_without() -> None:
    def broken(weights: torch.Tensor, ps: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler")

    def another(weights: torch.Tensor, ps: torch.Tensor) -> torch.Tensor:
        return nucleus_by_sorting(weights, ps)

    cpu = torch.device("cpu")
    assert unless_it_fails(broken, cpu) is nucleus_by_sorting
    assert unless_it_fails(another, cpu) is another


KINDS = ["drawn", "flat", "peaked", "forbidden"]


@pytest.mark.parametrize("kind", KINDS)
def test_flashinfers_nucleus_is_the_same(kind: str) -> None:
    with flashinfer_on_cpu():
        compare_nuclei(logits_of(kind, 3000))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer")
@pytest.mark.parametrize("kind", KINDS)
def test_flashinfers_nucleus_is_the_same_on_a_gpu(kind: str) -> None:
    compare_nuclei(logits_of(kind, 3000).cuda())


def compare_nuclei(logits: torch.Tensor) -> None:
    for limits in LIMITS.values():
        rows = [SamplingParams(**limits)] * len(NUMBERS)
        scores = logits.expand(len(NUMBERS), -1).contiguous()
        found = draw_on_device(scores, rows, NUMBERS, nucleus_by_flashinfer)
        assert found.tolist() == draw(scores.cpu(), rows, NUMBERS), limits
