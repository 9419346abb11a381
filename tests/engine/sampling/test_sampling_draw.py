"""Random choice follows the restricted distribution, and one sequence's draws do not depend on its batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from common.sampling_params import SamplingParams
from engine.sampling.draw import CANDIDATES, draw, uniform
from engine.state.request import Sequence
from tests.engine.sampling.sampled import make_sampler, make_sequence

NUM_DRAWS = 20_000


def warpers(params: SamplingParams) -> reference.LogitsProcessorList:
    """transformers' own, in the order of `generate`."""
    chosen: list[Any] = [reference.TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        chosen.append(reference.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chosen.append(reference.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chosen.append(reference.MinPLogitsWarper(params.min_p))
    return reference.LogitsProcessorList(chosen)


def expected_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocab_size] in double precision."""
    warped: torch.Tensor = warpers(params)(torch.zeros((1, 1), dtype=torch.long), logits.unsqueeze(0))
    return warped[0].double().softmax(dim=-1)


def random_logits(vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution(name: str) -> None:
    """Pearson's chi-square of 20,000 draws: a correct sampler exceeds the bound for one seed in a thousand."""
    params, logits = SETTINGS[name], random_logits(40, 1.5)
    expected = expected_probabilities(logits, params) * NUM_DRAWS
    uniforms = [uniform(17, position) for position in range(NUM_DRAWS)]
    drawn = torch.tensor(draw(logits.expand(NUM_DRAWS, -1), [params] * NUM_DRAWS, uniforms))
    counts = torch.bincount(drawn, minlength=40).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    frequent = expected >= 5  # below, the statistic does not follow its distribution: one bin for all of them
    rare = kept & ~frequent
    bins = [(counts[frequent], expected[frequent])]
    if rare.any():
        bins.append((counts[rare].sum().reshape(1), expected[rare].sum().reshape(1)))
    statistic = sum(float(((seen - mean) ** 2 / mean).sum()) for seen, mean in bins)
    freedom = sum(len(mean) for _, mean in bins) - 1
    assert statistic < _chi_square_bound(freedom)


def _chi_square_bound(freedom: int) -> float:
    """The 99.9th percentile, by Wilson and Hilferty's approximation (1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all"])
def test_the_same_tokens_are_kept_as_by_transformers(name: str, scale: float) -> None:
    """Every kept token is hit where the cumulative distribution of transformers says, none outside. Flat
    distributions need more candidates than are looked at first."""
    params, logits = SETTINGS[name], random_logits(3000, scale)
    cumulative = expected_probabilities(logits, params).cumsum(dim=0)
    kept = expected_probabilities(logits, params).nonzero().squeeze(1)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), cumulative])[kept]
    middles = ((before + cumulative[kept]) / 2).tolist()
    assert draw(logits.expand(len(kept), -1), [params] * len(kept), middles) == kept.tolist()


def test_a_wide_nucleus_goes_beyond_the_first_candidates() -> None:
    flat = torch.linspace(0, 0.1, 3 * CANDIDATES[-1])
    uniforms = [position / 8192 for position in range(8192)]
    drawn = set(draw(flat.expand(8192, -1), [SamplingParams(top_p=0.75)] * 8192, uniforms))
    kept = int((expected_probabilities(flat, SamplingParams(top_p=0.75)) > 0).sum())
    assert len(drawn) == kept > 2 * CANDIDATES[-1]


def test_equal_scores_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    uniforms = [position / 100 for position in range(100)]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.75)):
        assert set(draw(logits.expand(100, -1), [params] * 100, uniforms)) == {0, 1, 2, 3}


def test_ties_beyond_the_candidates_count_for_the_nucleus() -> None:
    """All 2999 equal tokens are the second likeliest: the first, one of eleven parts, is not half of what is left."""
    logits = torch.zeros(3000)
    logits[0] = math.log(300)
    drawn = draw(logits.expand(2, -1), [SamplingParams(top_k=2, top_p=0.5)] * 2, [0.05, 0.5])
    assert drawn[0] == 0
    assert drawn[1] > 1000


def test_without_top_p_the_least_likely_of_top_k_stays() -> None:
    logits = torch.tensor([0.0, -20.0, -21.0])
    assert draw(logits.unsqueeze(0), [SamplingParams(top_k=2)], [1 - 1e-12]) == [1]


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
def test_forbidden_tokens_are_never_drawn(params: SamplingParams) -> None:
    logits = random_logits(40, 1.0)
    logits[::2] = -torch.inf
    edges = [0.0, 1.0 - 2.0**-52, *(uniform(3, position) for position in range(500))]
    drawn = draw(logits.expand(len(edges), -1), [params] * len(edges), edges)
    assert all(token % 2 for token in drawn)


def test_every_token_of_a_long_unlikely_tail_can_be_drawn() -> None:
    """200,000 tokens of 3e-8 beside one of 1: in single precision most of their sums would be equal."""
    logits = torch.zeros(200_001)
    logits[0] = -math.log(3e-8)
    total = 1 + 200_000 * 3e-8
    tokens = [1, 2, 3, 1000, 1001, 1002, 123_456, 200_000]
    middles = [(1 + (token - 0.5) * 3e-8) / total for token in tokens]
    assert draw(logits.expand(len(tokens), -1), [SamplingParams()] * len(tokens), middles) == tokens


def test_rows_with_and_without_restrictions_mix() -> None:
    """Flat rows of 3000 tokens: whoever is restricted by a neighbour's settings draws something else."""
    logits = random_logits(3000, 0.1)
    mixed = [*SETTINGS.values(), SamplingParams()]
    for position in range(50):
        uniforms = [uniform(position, row) for row in range(len(mixed))]
        alone = [draw(logits.unsqueeze(0), [params], [number]) for params, number in zip(mixed, uniforms, strict=True)]
        assert draw(logits.expand(len(mixed), -1), mixed, uniforms) == [token for (token,) in alone]


def test_numbers_of_a_seed_are_even_and_those_of_neighbouring_seeds_unrelated() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(500)] for seed in range(40)])
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < _chi_square_bound(19)
    correlations = torch.corrcoef(numbers).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 0.25  # standard deviation 1 / sqrt(500), 780 pairs
    assert uniform(2**64 - 1, 0) == uniform(-1, 0) != uniform(1, 0)
    assert uniform(0x9E3779B97F4A7C15, 0) != uniform(0, 1)  # one seed's row of numbers is not another's, shifted


@given(
    seed=st.integers(0, 2**62),
    neighbours=st.lists(
        st.tuples(st.integers(0, 2**62), st.floats(0.0, 2.0), st.integers(0, 8), st.floats(0.3, 1.0)), max_size=6
    ),
    place=st.integers(0, 6),
)
@settings(max_examples=60)
def test_the_same_seed_draws_the_same_tokens_in_any_batch(
    seed: int, neighbours: list[tuple[int, float, int, float]], place: int
) -> None:
    sampler, logits = make_sampler(), random_logits(60 * 8, 1.0).view(8, 60)

    def run(others: list[Sequence]) -> list[int]:
        ours = make_sequence(temperature=0.9, top_k=20, top_p=0.9, seed=seed)
        batch = [*others[:place], ours, *others[place:]]
        for step in range(6):
            rows = torch.stack([logits[(step + (one is not ours)) % 8] for one in batch])
            for one, sampled in zip(batch, sampler.sample(rows, batch), strict=True):
                one.token_ids.append(sampled.token_id)
        return ours.token_ids

    others = [
        make_sequence(seed=other, temperature=temperature, top_k=top_k, top_p=top_p)
        for other, temperature, top_k, top_p in neighbours
    ]
    assert run(others) == run([])


def test_a_sequence_that_moved_goes_on_with_the_same_draws() -> None:
    sampler, logits = make_sampler(), random_logits(60, 1.0)
    stayed = make_sequence(temperature=1.0, seed=9)
    for _ in range(10):
        stayed.token_ids.append(sampler.sample(logits.clone().unsqueeze(0), [stayed])[0].token_id)
    moved = make_sequence([1], stayed.token_ids[1:5], temperature=1.0, seed=9)
    for _ in range(6):
        moved.token_ids.append(make_sampler().sample(logits.clone().unsqueeze(0), [moved])[0].token_id)
    assert moved.token_ids == stayed.token_ids
    other = make_sequence(temperature=1.0, seed=10)
    for _ in range(10):
        other.token_ids.append(sampler.sample(logits.clone().unsqueeze(0), [other])[0].token_id)
    assert other.token_ids != stayed.token_ids
