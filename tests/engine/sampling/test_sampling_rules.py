"""Each rule gives the scores that transformers' own processor gives, alone, in a batch and all together."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as reference

from common.errors import TriptychError
from common.sampling_params import SamplingParams, TimestampRules
from engine.state.request import Sequence
from tests.engine.sampling.sampled import EOS, VOCAB_SIZE, make_sampler, make_sequence

FIRST_TIMESTAMP = 40
RULES = TimestampRules(FIRST_TIMESTAMP, FIRST_TIMESTAMP - 1, max_initial_index=5)
PROMPT = [1, 7, 7, 3]


def random_scores(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 4


def random_tokens(count: int, seed: int, limit: int = 6) -> list[int]:
    """Few different tokens, so that they repeat."""
    draw = random.Random(seed)
    return [draw.randrange(3, limit) for _ in range(count)]


def apply_ours(sequences: ListOf[Sequence], scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    make_sampler().apply_rules(scores, sequences)
    return scores


def apply_reference(
    sequences: ListOf[Sequence], scores: torch.Tensor, *processors: reference.LogitsProcessor
) -> torch.Tensor:
    rows = []
    for sequence, row in zip(sequences, scores, strict=True):
        row = row.unsqueeze(0)
        for processor in processors:
            row = processor(torch.tensor([sequence.token_ids]), row)
        rows.append(row)
    return torch.cat(rows)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def make_batch(**sampling: Any) -> list[Sequence]:
    """Sequences of several lengths under the same settings."""
    return [make_sequence(PROMPT, random_tokens(length, seed=length), **sampling) for length in (0, 1, 2, 5, 30)]


PROCESSORS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "logit_bias": (
        {"logit_bias": {4: 2.5, 50: -3.0}},
        lambda: reference.SequenceBiasLogitsProcessor({(4,): 2.5, (50,): -3.0}),
    ),
    "repetition": ({"repetition_penalty": 1.7}, lambda: reference.RepetitionPenaltyLogitsProcessor(1.7)),
    "unigrams": ({"no_repeat_ngram_size": 1}, lambda: reference.NoRepeatNGramLogitsProcessor(1)),
    "bigrams": ({"no_repeat_ngram_size": 2}, lambda: reference.NoRepeatNGramLogitsProcessor(2)),
    "trigrams": ({"no_repeat_ngram_size": 3}, lambda: reference.NoRepeatNGramLogitsProcessor(3)),
    "bad words": (
        {"bad_words_ids": ((5,), (EOS,), (7, 3, 9), (4, 5), (6, 7))},
        lambda: reference.NoBadWordsLogitsProcessor([[5], [EOS], [7, 3, 9], [4, 5], [6, 7]], EOS),
    ),
    "min tokens": ({"min_tokens": 2}, lambda: reference.MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, EOS)),
    "suppressed": (
        {"suppress_tokens": (3, 9), "begin_suppress_tokens": (4, 5)},
        lambda: reference.LogitsProcessorList(
            [
                reference.SuppressTokensLogitsProcessor([3, 9]),
                reference.SuppressTokensAtBeginLogitsProcessor([4, 5], len(PROMPT)),
            ]
        ),
    ),
    "allowed": (
        {"allowed_token_ids": (3, 9, 11)},
        lambda: reference.PrefixConstrainedLogitsProcessor(lambda *_: [3, 9, 11], 1),
    ),
    "forced end": (
        {"forced_eos_token_id": 6, "max_tokens": 6},
        lambda: reference.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 6, 6),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_rule_changes_scores_as_transformers_does(name: str) -> None:
    settings, make_processor = PROCESSORS[name]
    batch, scores = make_batch(**settings), random_scores(5)
    ours = apply_ours(batch, scores)
    assert_same(ours, apply_reference(batch, scores, make_processor()))
    assert not torch.equal(ours, scores)


def test_rules_together_are_applied_in_the_order_of_generate() -> None:
    settings: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": ((5, 6), (8,)),
        "suppress_tokens": (9, 10),
        "begin_suppress_tokens": (11,),
    }
    ours = {"logit_bias": {4: 9.0, 7: -8.0}, "min_tokens": 3, "max_tokens": 31, "forced_eos_token_id": EOS}
    batch, scores = make_batch(**ours, **settings), random_scores(5)
    theirs = {"sequence_bias": [[[4], 9.0], [[7], -8.0]], "min_new_tokens": 3, "max_length": len(PROMPT) + 31}
    config = GenerationConfig(**theirs, **settings, forced_eos_token_id=EOS)
    config.bad_words_ids = [list(sequence) for sequence in settings["bad_words_ids"]]
    config._eos_token_tensor = torch.tensor([EOS])
    tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=60)
    processors = LlamaForCausalLM(tiny)._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu")
    assert len(processors) == 8
    assert_same(apply_ours(batch, scores), apply_reference(batch, scores, *processors))


@pytest.mark.parametrize("seed", range(40))
def test_timestamps_follow_the_rules_of_whisper(seed: int) -> None:
    draw = random.Random(seed)
    output: list[int] = []
    for _ in range(draw.randrange(8)):
        last = max([FIRST_TIMESTAMP, *(token for token in output if token >= FIRST_TIMESTAMP)])
        output.append(draw.choice([draw.randrange(3, 38), min(last + draw.randrange(3), VOCAB_SIZE - 1)]))
    sequence = make_sequence(PROMPT, output, timestamps=RULES)
    config = SimpleNamespace(
        no_timestamps_token_id=RULES.no_timestamps_token_id, eos_token_id=38, max_initial_timestamp_index=5
    )
    processor = reference.WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    scores = random_scores(1, seed)
    scores[:, FIRST_TIMESTAMP:] += draw.uniform(-4, 4)
    ours = scores.clone()
    make_sampler(eos=(38,)).apply_rules(ours, [sequence])
    assert_same(ours, apply_reference([sequence], scores, processor))


def test_timestamps_begin_after_a_forced_prefix() -> None:
    """Language and task tokens that were generated are no text: the first token after them is a timestamp."""
    sequence = make_sequence([1], [50, 51], prefix_allowed=((50, 52), (51,)), timestamps=RULES)
    scores = apply_ours([sequence], random_scores(1))
    allowed = (scores[0] > -torch.inf).nonzero().squeeze(1).tolist()
    assert allowed == list(range(FIRST_TIMESTAMP, FIRST_TIMESTAMP + 6))


def test_a_forced_token_costs_a_beam_nothing_and_of_several_the_likeliest_is_forced() -> None:
    """A language is detected at any temperature, not drawn."""
    scores = random_scores(2).log_softmax(dim=-1)
    prefix = ((20,), (30, 31))
    batch = [make_sequence(PROMPT, output, prefix_allowed=prefix, suppress_tokens=(20, 30)) for output in ([], [20])]
    ours = apply_ours(batch, scores)
    likeliest = 30 + int(scores[1, 30:32].argmax())
    for row, token in enumerate((20, likeliest)):
        forced = reference.ForcedBOSTokenLogitsProcessor(token)(torch.tensor([[1]]), scores[row : row + 1])
        assert torch.equal(ours[row : row + 1], forced)


def test_penalties_count_the_output_and_not_the_prompt() -> None:
    sequence = make_sequence([7, 7, 8], [9, 9, 10], presence_penalty=0.5, frequency_penalty=0.25)
    ours = apply_ours([sequence], torch.zeros(1, VOCAB_SIZE))[0]
    expected = torch.zeros(VOCAB_SIZE)
    expected[9], expected[10] = -0.5 - 2 * 0.25, -0.5 - 0.25
    assert_same(ours, expected)


def test_min_tokens_hold_back_stop_tokens_as_well_as_the_end() -> None:
    scores = apply_ours([make_sequence(PROMPT, [5], min_tokens=2, stop_token_ids=(9,))], random_scores(1))
    assert (scores[0] == -torch.inf).nonzero().squeeze(1).tolist() == [EOS, 9]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": ((3, 4), (5,))},
    ],
)
def test_notes_kept_from_step_to_step_equal_notes_made_afresh(settings: dict[str, Any]) -> None:
    """A fork or a resume drops the notes: rebuilt from the tokens, they forbid and penalise the same."""
    sampler, scores = make_sampler(), random_scores(1)
    kept = make_sequence(PROMPT, **settings)
    for token in random_tokens(200, seed=3, limit=VOCAB_SIZE):
        ours, fresh = scores.clone(), scores.clone()
        sampler.apply_rules(ours, [kept])
        sampler.apply_rules(fresh, [kept.fork(0)])
        assert torch.equal(ours, fresh)
        kept.token_ids.append(token)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    batch = [
        make_sequence(PROMPT, random_tokens(6, seed), **settings)
        for seed, (settings, _) in enumerate(PROCESSORS.values())
    ]
    batch.insert(3, make_sequence(PROMPT, [5]))
    scores = random_scores(len(batch))
    together = apply_ours(batch, scores)
    for row, sequence in enumerate(batch):
        assert torch.equal(together[row], apply_ours([sequence], scores[row : row + 1])[0])
    assert torch.equal(together[3], scores[3])


def test_tokens_without_a_logit_are_passed_over() -> None:
    """The placeholder of a picture may have an id beyond the output head."""
    sequence = make_sequence([1, VOCAB_SIZE, 5, VOCAB_SIZE, 5], repetition_penalty=2.0, no_repeat_ngram_size=2)
    scores = apply_ours([sequence], torch.ones(1, VOCAB_SIZE))
    assert (scores[0] != 1.0).nonzero().squeeze(1).tolist() == [1, 5]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("logit_bias", {VOCAB_SIZE: 1.0}, "60"),
        ("allowed_token_ids", (3, -1), "-1"),
        ("bad_words_ids", ((3, 4), (5, 61)), "61"),
        ("stop_token_ids", (99,), "99"),
        ("suppress_tokens", (60,), "60"),
        ("begin_suppress_tokens", (60,), "60"),
        ("prefix_allowed", ((3,), (4, 77)), "77"),
        ("forced_eos_token_id", 60, "60"),
        ("timestamps", TimestampRules(60, 59), "60"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_field(field: str, value: Any, named: str) -> None:
    with pytest.raises(TriptychError, match=f"token id {named} in {field} is outside the vocabulary of 60") as caught:
        make_sampler().check(SamplingParams(**{field: value}))
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_request", field)


def test_timestamps_need_a_token_that_ends_the_text() -> None:
    with pytest.raises(TriptychError, match="no end-of-sequence token"):
        make_sampler(eos=()).check(SamplingParams(timestamps=RULES))
