"""Whisper: `LLM` transcribes what transformers transcribes, whatever is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.text import whisper_prompt
from common.text.whisper_words import alignment_request
from engine.llm import LLM
from tests.equality.cases import MAX_TOKENS as LIMITS
from tests.equality.cases import Case, CasesOf, FolderOf, timed_speech_cases
from tests.equality.media import recording
from tests.equality.references import Reference
from tests.equality.runs import answer_all, expected_of, llm_of_blocks

MAX_TOKENS = LIMITS["whisper"]
OPTIONS: list[Any] = [
    {},
    pytest.param({"max_num_batched_tokens": 2}, marks=pytest.mark.slow),
    {"max_num_seqs": 2, "block_size": 7},
    {"encoder_cache_bytes": 1500 * 64 * 4, "encoder_batch_items": 2},
]


@pytest.fixture(scope="module")
def clips(folder_of: FolderOf, cases_of: CasesOf) -> tuple[Path, list[Case]]:
    return folder_of("whisper"), cases_of("whisper")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("steps_between", [0, 2], ids=["at once", "staggered"])
def test_tokens_equal_transformers(clips: tuple[Path, list[Case]], options: dict[str, Any], steps_between: int) -> None:
    folder, cases = clips
    llm = LLM(folder, **options)
    assert answer_all(llm, cases, MAX_TOKENS, steps_between=steps_between) == expected_of(cases)


def test_tokens_equal_transformers_when_the_pool_is_too_small_for_all(clips: tuple[Path, list[Case]]) -> None:
    folder, cases = clips
    num_blocks = 2 * (1500 // 4) + 9  # two clips with their cross-attention blocks, and few of their own
    llm = llm_of_blocks(folder, num_blocks, 4, encoder_cache_bytes=1500 * 64 * 4)
    assert answer_all(llm, cases, MAX_TOKENS) == expected_of(cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


@pytest.mark.parametrize("num_blocks", [4000, 2 * (1500 // 4) + 9], ids=["roomy pool", "tight pool"])
def test_requests_over_the_same_audio_answer_as_if_alone(clips: tuple[Path, list[Case]], num_blocks: int) -> None:
    folder, cases = clips
    repeated = [cases[0], cases[1], cases[0], cases[2], cases[0], cases[1]]
    llm = llm_of_blocks(folder, num_blocks, 4)
    assert answer_all(llm, repeated, MAX_TOKENS, steps_between=1) == expected_of(repeated)
    assert llm.decoder.stats()["cross_table_hits_total"] > 0


def test_timestamps_equal_transformers(clips: tuple[Path, list[Case]]) -> None:
    reference, llm = Reference(clips[0]), LLM(clips[0])
    cases = timed_speech_cases(reference, MAX_TOKENS)
    rules = whisper_prompt.timestamp_rules(llm.info, llm.text)
    assert rules is not None
    assert all(sum(token >= rules.first_token_id for token in case.expected) >= 2 for case in cases)
    assert answer_all(llm, cases, MAX_TOKENS) == expected_of(cases)


@pytest.mark.weights
def test_a_recording_is_transcribed_as_by_transformers(whisper_tiny_en: Path) -> None:
    reference, llm = Reference(whisper_tiny_en), LLM(whisper_tiny_en)
    prompt, rules = whisper_prompt.build(llm.info, llm.text, language=None)
    cases = []
    for name in ("dashwood.flac", "amiable.wav"):
        media, samples = recording(name)
        cases.append(Case(prompt, reference.transcribe(samples, 60), [media], rules))
    assert answer_all(llm, cases, 60, integrity=False) == expected_of(cases)
    assert "leisure to consider how much there might be prudently" in llm.text.decode(cases[0].expected)
    [completion] = llm.transcribe(cases[1].media[0]).outputs
    assert completion.text.strip() == "He might even have been made amiable himself."


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 3}, {"block_size": 7}], ids=str)
def test_times_of_words_do_not_depend_on_how_the_prompt_is_computed(
    clips: tuple[Path, list[Case]], options: dict[str, Any]
) -> None:
    audio, samples = recording("amiable.wav")
    found = []
    for llm in (LLM(clips[0]), LLM(clips[0], **options)):
        said, duration_s = list(range(10, 40)), len(samples) / 16000
        ids, sampling = alignment_request(
            llm.info, llm.text, said, language="en", task="transcribe", duration_s=duration_s
        )
        [answer] = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"audio": audio}}, sampling)
        found.append([one.frame for one in answer.prompt_logprobs[-len(said) - 1 :] if one is not None])
        assert llm.decoder.is_empty()
    assert found[0] == found[1] == sorted(found[0])
    assert found[0][-1] > 0
