"""The sampler as the engine uses it: choices, log-probabilities, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from common.errors import TriptychError
from common.sampling_params import Grammar, SamplingParams, TimestampRules
from engine.sampling.logprobs import describe_tokens
from tests.engine.sampling.sampled import EOS, VOCAB_SIZE, make_sampler, make_sequence


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_sequences_get_the_likeliest_token() -> None:
    logits = random_logits(4)
    sampled = make_sampler().sample(logits.clone(), [make_sequence() for _ in range(4)])
    assert [one.token_id for one in sampled] == logits.argmax(dim=-1).tolist()
    assert all(one.logprob is None and one.error is None for one in sampled)


def test_a_batch_may_mix_all_kinds_of_choice() -> None:
    logits = random_logits(4)
    best = logits.argmax(dim=-1).tolist()
    batch = [
        make_sequence(),
        make_sequence(temperature=0.5, seed=3),
        make_sequence(suppress_tokens=(best[2],)),
        make_sequence(temperature=1.0, top_k=1),
    ]
    tokens = [one.token_id for one in make_sampler().sample(logits.clone(), batch)]
    assert tokens[0] == best[0]
    assert tokens[2] == logits[2].topk(2).indices[1]
    assert tokens[3] == best[3]
    assert tokens[1] == make_sampler().sample(logits[1:2].clone(), [batch[1]])[0].token_id


def test_logprobs_are_of_the_raw_logits_whatever_changed_them() -> None:
    logits = random_logits(3)
    best = int(logits[0].argmax())
    batch = [
        make_sequence(logprobs=3, suppress_tokens=(best,)),
        make_sequence(),
        make_sequence(logprobs=0, temperature=2.0, presence_penalty=1.0, seed=4),
    ]
    sampled = make_sampler().sample(logits.clone(), batch)
    expected = logits.log_softmax(dim=-1)
    first = sampled[0].logprob
    assert first is not None
    assert (first.token_id, first.rank) == (int(logits[0].topk(2).indices[1]), 2)
    assert first.logprob == pytest.approx(float(expected[0, first.token_id]), abs=1e-6)
    assert [token for token, _ in first.top] == logits[0].topk(3).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-6)
    assert sampled[1].logprob is None
    last = sampled[2].logprob
    assert last is not None
    assert last.logprob == pytest.approx(float(expected[2, sampled[2].token_id]), abs=1e-6)
    assert last.top == []


def test_a_plain_greedy_sequence_gets_logprobs_too() -> None:
    logits = random_logits(1)
    (sampled,) = make_sampler().sample(logits.clone(), [make_sequence(logprobs=2)])
    assert sampled.logprob is not None
    assert sampled.logprob.rank == 1
    assert sampled.logprob.top[0] == (sampled.token_id, sampled.logprob.logprob)


def test_prompt_logprobs_tell_what_the_model_thought_of_each_next_token() -> None:
    logits = random_logits(5)
    following = [7, int(logits[1].argmax()), 9, int(logits[3].argmin()), 3]
    described = describe_tokens(logits, following, [2] * len(following))
    expected = logits.log_softmax(dim=-1)
    assert [one.token_id for one in described] == following
    values = [float(expected[row, token]) for row, token in enumerate(following)]
    assert [one.logprob for one in described] == pytest.approx(values, abs=1e-6)
    assert (described[1].rank, described[3].rank) == (1, VOCAB_SIZE)
    assert all(len(one.top) == 2 for one in described)
    assert describe_tokens(logits[:0], [], []) == []


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    (described,) = describe_tokens(torch.zeros(1, 5), [4], [20])
    assert described.logprob == pytest.approx(math.log(0.2))
    assert (described.rank, len(described.top)) == (1, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_forbid_everything_end_the_sequence(temperature: float) -> None:
    sequence = make_sequence(temperature=temperature, allowed_token_ids=(4, 5), suppress_tokens=(4, 5))
    (sampled,) = make_sampler().sample(random_logits(1), [sequence])
    assert sampled.token_id == EOS


def test_a_sequence_keeps_its_notes_until_somebody_drops_them() -> None:
    sampler, sequence = make_sampler(), make_sequence([1, 5, 6], no_repeat_ngram_size=2)
    sampler.sample(random_logits(1), [sequence])
    notes = sequence.sampler_state
    sequence.token_ids.append(5)
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.apply_rules(scores, [sequence])
    assert sequence.sampler_state is notes
    sequence.sampler_state = None
    again = torch.zeros(1, VOCAB_SIZE)
    sampler.apply_rules(again, [sequence])
    assert torch.equal(scores, again)
    assert scores[0, 6] == -torch.inf


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("beam_width", 0, "between 1 and 128"),
        ("length_penalty", math.nan, "must be between -5 and 5"),
        ("length_penalty", -5.1, "must be between -5 and 5"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", 17, "0 to max_tokens=16"),
        ("temperature", 2.1, "between 0 and 2"),
        ("temperature", math.nan, "between 0 and 2"),
        ("top_p", 0.0, "above 0"),
        ("top_k", -2, "0 or -1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("presence_penalty", -2.5, "between -2 and 2"),
        ("frequency_penalty", math.inf, "between -2 and 2"),
        ("no_repeat_ngram_size", -1, "0 .off. or positive"),
        ("logit_bias", {3: 101.0}, "between -100 and 100"),
        ("bad_words", ("",), "non-empty strings"),
        ("bad_words_ids", ((),), "non-empty token sequences"),
        ("prefix_allowed", ((3,), ()), "at least one token"),
        ("logprobs", 21, "between 0 and 20"),
        ("prompt_logprobs", -1, "between 0 and 20"),
        ("seed", 2**64, "64 bits"),
        ("stop", ("",), "non-empty strings"),
        ("stop", ("x" * 1025,), "at most 1024 characters"),
        ("stop", ("x",) * 17, "at most 16"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any, said: str) -> None:
    with pytest.raises(TriptychError, match=said) as caught:
        SamplingParams(**{field: value}).validate()
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_request", field)


def test_more_results_than_beams_are_refused() -> None:
    with pytest.raises(TriptychError, match="n must be at most beam_width, not 3"):
        SamplingParams(n=3, beam_width=2).validate()


def test_good_settings_pass() -> None:
    full = SamplingParams(
        n=2,
        beam_width=3,
        max_tokens=5,
        min_tokens=5,
        top_k=-1,
        min_p=1.0,
        logprobs=20,
        seed=-1,
        logit_bias={3: -100.0},
        bad_words_ids=((3, 4),),
        prefix_allowed=((3,),),
        timestamps=TimestampRules(40, 39),
        grammar=Grammar("json_object"),
    )
    assert full.validate() is full
    make_sampler().check(SamplingParams(logit_bias={3: -100.0}, bad_words_ids=((3, 4),)))
