"""BART, mBART, T5 and Flan-T5: `LLM` generates what transformers' greedy `generate` generates, batched in any way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.core.encoder_engine import encoder_computations
from engine.llm import LLM
from tests.equality.cases import ENCODER_DECODER_FAMILIES, Case, CasesOf, FolderOf, ReferenceOf
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.media import text_prompts
from tests.equality.references import Reference
from tests.equality.runs import answer_all, at_once_or_staggered, expected_of, llm_of_blocks, strip
from tests.tiny import encdec

MAX_TOKENS = LIMITS["bart"]
OPTIONS: list[Any] = [
    {},
    pytest.param({"max_num_batched_tokens": 16, "encoder_batch_items": 1}, marks=pytest.mark.slow),
    pytest.param({"max_num_batched_tokens": 7, "block_size": 1}, marks=pytest.mark.slow),
    {"max_num_seqs": 3, "block_size": 5, "encoder_cache_bytes": 128 * 64 * 4},
]
Setup = tuple[Path, list[Case]]


@pytest.fixture(scope="module", params=ENCODER_DECODER_FAMILIES)
def setup(request: pytest.FixtureRequest, folder_of: FolderOf, cases_of: CasesOf) -> Setup:
    return folder_of(request.param), cases_of(request.param)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@at_once_or_staggered(3)
def test_tokens_equal_transformers(setup: Setup, options: dict[str, Any], steps_between: int) -> None:
    folder, cases = setup
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)


def test_the_cases_are_worth_comparing(setup: Setup) -> None:
    _, cases = setup
    answers = {tuple(case.expected) for case in cases}
    assert len(answers) >= len(cases) - 1  # two cases have the same encoder prompt
    assert sum(len(set(answer)) for answer in answers) > 6 * len(answers)


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(setup: Setup, block_size: int) -> None:
    folder, cases = setup
    longest = max(len(case.prompt) for case in cases) + MAX_TOKENS
    encoder = max(len(case.encoder_prompt or []) for case in cases)
    num_blocks = -(-longest // block_size) + -(-encoder // block_size) + 2
    llm = llm_of_blocks(folder, num_blocks, block_size, max_num_batched_tokens=32)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=1) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_texts_equal_transformers_as_its_users_call_it(setup: Setup, reference_of: ReferenceOf) -> None:
    """`generate(text)` without any decoder prompt; BART's default goes on with <BOS>, which the others have forced."""
    folder, _ = setup
    llm, reference = LLM(folder), reference_of(folder.name.removeprefix("tiny-"))
    texts = ["The rain in spain falls mainly on the", "hello", "plain"]
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([llm.text.encode(text)])
        forced = {"forced_bos_token_id": encdec.BOS} if llm.info.family.name == "bart" else {}
        start = len(output.prompt_token_ids)
        theirs = reference.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS + start - 1, do_sample=False, **forced
        )[0].tolist()
        assert theirs[:start] == output.prompt_token_ids
        assert theirs[start:] == output.outputs[0].token_ids


def test_an_output_tells_both_prompts(folder_of: FolderOf) -> None:
    llm = LLM(folder_of("bart"))
    pair = {"encoder_prompt": "ab", "decoder_prompt": {"prompt_tokens": [0, 51, 178]}}
    outputs = llm.generate(["ab", pair, [5, 6]], SamplingParams(temperature=0, max_tokens=3))  # type: ignore[list-item]
    ids = llm.text.encode("ab")
    told = [
        (output.encoder_prompt, output.encoder_prompt_token_ids, output.prompt, output.prompt_token_ids)
        for output in outputs
    ]
    assert told == [
        ("ab", ids, None, [2, 0]),
        ("ab", ids, None, [2, 0, 51, 178]),
        (None, [5, 6], None, [2, 0]),
    ]
    assert [output.num_prompt_tokens for output in outputs] == [2, 4, 2]
    [single] = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=3), return_prompts=True)
    assert single.outputs == outputs[2].outputs
    texts = [llm.text.decode(token_ids, skip_special_tokens=False) for token_ids in ([5, 6], [2, 0])]
    assert [single.encoder_prompt, single.prompt] == texts


def test_requests_over_the_same_text_share_its_encoding(folder_of: FolderOf) -> None:
    llm = LLM(folder_of("t5"))
    before = encoder_computations.value
    first, second = llm.generate(["same text"] * 2, SamplingParams(temperature=0, max_tokens=8))
    assert first.outputs == second.outputs
    assert encoder_computations.value == before + 1
    assert llm.decoder.stats()["cross_table_hits_total"] > 0


def test_the_decoder_may_fill_its_context_to_the_end(setup: Setup, reference_of: ReferenceOf) -> None:
    folder, cases = setup
    llm, reference = LLM(folder), reference_of(folder.name.removeprefix("tiny-"))
    case = next(case for case in cases if case.decoder_prompt is not None and len(case.prompt) > 20)
    room = llm.info.max_model_len - len(case.prompt)
    expected = reference.translate(case.encoder_prompt or [], case.prompt, room)
    params = SamplingParams(temperature=0, max_tokens=10_000)
    prompt: Any = {"encoder_prompt": case.encoder_prompt, "decoder_prompt": case.decoder_prompt}
    [output] = llm.generate([prompt], params)
    assert reference.strip(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        (
            {"encoder_prompt": "a", "decoder_prompt": [5] * 128},
            "context_length_exceeded",
            "129 tokens .* the context length is 128",
        ),
        ([5] * 129, "context_length_exceeded", "129 tokens, the encoder of .* takes at most 128"),
        (
            {"encoder_prompt": "a", "decoder_prompt": [264]},
            "invalid_request",
            "264 of the decoder prompt is outside the vocabulary",
        ),
        ({"decoder_prompt": "a"}, "invalid_request", "needs an encoder prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    folder_of: FolderOf, prompt: Any, code: str, message: str
) -> None:
    llm = LLM(folder_of("bart"))
    with pytest.raises(TriptychError, match=message) as caught:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))
    assert caught.value.info.code == code
    assert llm.decoder.is_empty()
    llm.decoder.check_integrity()


def test_the_rules_of_the_checkpoint_are_those_of_transformers(tmp_path: Path) -> None:
    """As bart-large-cnn has them: <BOS> first, <EOS> last, and no three tokens twice."""
    rules = {"forced_bos_token_id": encdec.BOS, "forced_eos_token_id": encdec.EOS, "no_repeat_ngram_size": 3}
    folder = encdec.make_bart(tmp_path / "bart", generation=rules)
    llm, reference = LLM(folder, max_num_batched_tokens=16), Reference(folder)
    prompts: list[Any] = [*text_prompts(6), {"encoder_prompt": [9, 8, 7], "decoder_prompt": [5, 6, 7, 5, 6]}]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for output in outputs:
        theirs = reference.model.generate(
            torch.tensor([output.encoder_prompt_token_ids]),
            attention_mask=torch.ones(1, len(output.encoder_prompt_token_ids or []), dtype=torch.long),
            decoder_input_ids=torch.tensor([output.prompt_token_ids]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )[0].tolist()
        assert theirs[len(output.prompt_token_ids) :] == output.outputs[0].token_ids
        assert output.outputs[0].token_ids[-1] == encdec.EOS
    unruled = LLM(encdec.make_bart(tmp_path / "plain")).generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    assert [output.outputs[0].token_ids for output in unruled] != [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("rules", [{"min_length": 12}, {"min_new_tokens": 12}], ids=str)
def test_the_least_length_of_the_checkpoint_is_that_of_transformers(tmp_path: Path, rules: dict[str, int]) -> None:
    eager = {"forced_bos_token_id": encdec.BOS, "eos_token_id": list(range(60, 264))}  # would end most answers early
    folder = encdec.make_bart(tmp_path / "bart", generation={**eager, **rules})
    llm, reference = LLM(folder, max_num_batched_tokens=16), Reference(folder)
    outputs = llm.generate(text_prompts(6), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for output in outputs:
        theirs = reference.model.generate(
            torch.tensor([output.encoder_prompt_token_ids]), max_new_tokens=MAX_TOKENS + 1, do_sample=False
        )[0].tolist()
        assert theirs[len(output.prompt_token_ids) :] == output.outputs[0].token_ids
    assert min(len(output.outputs[0].token_ids) for output in outputs) == (11 if "min_length" in rules else 12)


def test_a_clip_is_the_encoder_prompt_of_whisper(folder_of: FolderOf, cases_of: CasesOf) -> None:
    llm, case = LLM(folder_of("whisper")), cases_of("whisper")[0]
    audio = {"multi_modal_data": {"audio": case.media[0]}}
    text = llm.text.decode(case.prompt, skip_special_tokens=False)
    prompts: list[Any] = [
        {"encoder_prompt": audio, "decoder_prompt": {"prompt_token_ids": case.prompt}},
        {"encoder_prompt": {**audio, "prompt": ""}, "decoder_prompt": text},
        {**audio, "prompt": text},
        {**audio, "prompt_tokens": case.prompt[1:]},
    ]
    params = SamplingParams(**{**case.rules, "temperature": 0, "max_tokens": LIMITS["whisper"]})
    for output in llm.generate(prompts, params):
        assert output.prompt_token_ids == case.prompt
        assert output.encoder_prompt is None
        assert strip(llm.info, output.outputs[0].token_ids) == case.expected
    given = llm.transcribe(case.media[0], decoder_prompt=text, return_prompts=True)
    told = llm.transcribe(case.media[0], language="en")
    assert (given.prompt_token_ids, given.outputs) == (told.prompt_token_ids, told.outputs)
    assert (given.prompt, given.encoder_prompt, told.prompt) == (text, None, None)
