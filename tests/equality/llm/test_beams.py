"""Beam search: `LLM` finds the sequences, and the scores, that transformers' `generate(num_beams=…)` finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor, GenerationMixin

from common.sampling_params import SamplingParams
from common.text import whisper_prompt
from engine.core.encoder_engine import encoder_computations
from engine.llm import LLM, RequestOutput
from tests import tiny_models
from tests.equality.cases import FolderOf, ReferenceOf
from tests.equality.media import sound, text_prompts, wav
from tests.equality.references import SAMPLE_RATE, Reference
from tests.equality.runs import llm_of_blocks
from tests.tiny import encdec

MAX_TOKENS = 14


@dataclass(frozen=True)
class Search:
    """What a user asks for, here and there."""

    width: int
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def params(self, **rules: Any) -> SamplingParams:
        settings = {"beam_width": self.width, "n": self.n, "length_penalty": self.length_penalty}
        more = {"early_stopping": self.early_stopping, "temperature": 0.0, "max_tokens": MAX_TOKENS}
        return SamplingParams(**{**rules, **settings, **more})

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "num_beams": self.width,
            "num_return_sequences": self.n,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "max_new_tokens": MAX_TOKENS,
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_scores": True,
            **more,
        }


SEARCHES = [
    Search(2),
    Search(3, n=3, length_penalty=0.0),
    Search(3, n=2, early_stopping=True),
    Search(4, n=4, length_penalty=2.0),
    Search(5, n=3, length_penalty=-0.7, early_stopping=True),
]
SAMPLED = [*SEARCHES[:1], *(pytest.param(search, marks=pytest.mark.slow) for search in SEARCHES[1:4]), SEARCHES[4]]
"""The narrowest and the widest belong to the five-minute loop."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 5, "max_num_seqs": 5, "block_size": 3},
    {"prefix_caching": False, "block_size": 1},
]


@dataclass(frozen=True)
class Found:
    """Sequences without prompt and padding, with their scores."""

    sequences: list[list[int]]
    scores: list[float]


def found_by(output: RequestOutput) -> Found:
    return Found([one.token_ids for one in output.outputs], [one.score or 0.0 for one in output.outputs])


def cut(reference: Reference, rows: torch.Tensor, scores: torch.Tensor, start: int) -> Found:
    """Up to the first end-of-sequence token, which stays."""
    ends, sequences = reference.info.eos_token_ids, []
    for row in rows[:, start:].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        sequences.append(row[: end + 1])
    return Found(sequences, scores.tolist())


def check(ours: Sequence[RequestOutput], theirs: Sequence[Found]) -> None:
    for output, expected in zip(ours, theirs, strict=True):
        found = found_by(output)
        assert found.sequences == expected.sequences
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def search_text(reference: Reference, prompt: Sequence[int], search: Search, **more: Any) -> Found:
    ids = torch.tensor([list(prompt)])
    out = reference.model.generate(ids, attention_mask=torch.ones_like(ids), **search.options(**more))
    return cut(reference, out.sequences, out.sequences_scores, len(prompt))


@torch.inference_mode()
def search_translations(
    reference: Reference, encoder_prompt: Sequence[int], prompt: Sequence[int], search: Search, **more: Any
) -> Found:
    ids = torch.tensor([list(encoder_prompt)])
    options = search.options(decoder_input_ids=torch.tensor([list(prompt)]), **more)
    out = reference.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return cut(reference, out.sequences, out.sequences_scores, len(prompt))


# --- decoder-only


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some ordinary tokens end a sequence, or hardly any beam would."""
    folder = tiny_models.make_llama(tmp_path_factory.mktemp("llama") / "llama")
    tiny_models.save_generation(folder, eos_token_id=[*range(40, 52), 258], pad_token_id=256)
    return folder


@pytest.fixture(scope="module")
def llama_reference(llama: Path) -> Reference:
    return Reference(llama)


def llama_prompts() -> list[list[int]]:
    return [prompt[:30] for prompt in text_prompts(5)]


@cache
def text_beams(reference: Reference, search: Search) -> list[Found]:
    """What transformers finds for `llama_prompts`, searched once for all options."""
    return [search_text(reference, prompt, search) for prompt in llama_prompts()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("search", SAMPLED, ids=str)
def test_beams_of_a_text_model(
    llama: Path, llama_reference: Reference, search: Search, options: dict[str, Any]
) -> None:
    llm = LLM(llama, **options)
    check(llm.generate(llama_prompts(), search.params()), text_beams(llama_reference, search))
    assert llm.decoder.is_empty()
    llm.decoder.check_integrity()


def test_the_beams_are_worth_comparing(llama: Path, llama_reference: Reference) -> None:
    """They end early and late, and are not what greedy search finds."""
    found = text_beams(llama_reference, SEARCHES[1])
    lengths = {len(tokens) for one in found for tokens in one.sequences}
    assert len(lengths) > 3
    assert max(lengths) > MAX_TOKENS // 2
    greedy = LLM(llama).generate(llama_prompts(), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    assert any(one.outputs[0].token_ids != beams.sequences[0] for one, beams in zip(greedy, found, strict=True))


RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"suppress_tokens": tuple(range(5, 40))}, {"suppress_tokens": list(range(5, 40))}),
    ({"no_repeat_ngram_size": 2, "min_tokens": 6}, {"no_repeat_ngram_size": 2, "min_new_tokens": 6}),
    ({"forced_eos_token_id": 258, "repetition_penalty": 1.4}, {"forced_eos_token_id": 258, "repetition_penalty": 1.4}),
    ({"bad_words_ids": ((7,), (8, 9))}, {"bad_words_ids": [[7], [8, 9]]}),
]


@pytest.mark.parametrize(("ours", "theirs"), RULES, ids=lambda rules: "+".join(rules))
def test_rules_hold_for_beams(
    llama: Path, llama_reference: Reference, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    search = SEARCHES[1]
    expected = [search_text(llama_reference, prompt, search, **theirs) for prompt in llama_prompts()]
    check(LLM(llama).generate(llama_prompts(), search.params(**ours)), expected)


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_beams_that_lose_their_blocks_beside_sampling_neighbours(
    llama: Path, llama_reference: Reference, policy: str
) -> None:
    """Searches of several widths and sampled requests in a pool that holds the largest search and little more."""
    prompts = llama_prompts()
    shared = [len(prompt) // 4 for prompt in prompts]
    own = [-(-(len(prompt) + MAX_TOKENS) // 4) - count for prompt, count in zip(prompts, shared, strict=True)]
    num_blocks = 1 + max(s + o * search.width for s, o, search in zip(shared, own, SEARCHES, strict=True))
    neighbour = SamplingParams(seed=3, n=2, max_tokens=MAX_TOKENS, ignore_eos=True)
    params = [part for search in SEARCHES for part in (neighbour, search.params())]
    mixed = [prompt for prompt in prompts for _ in range(2)]
    expected = [search_text(llama_reference, prompt, search) for prompt, search in zip(prompts, SEARCHES, strict=True)]
    alone = [LLM(llama).generate([prompt], neighbour)[0] for prompt in prompts]
    llm = llm_of_blocks(llama, num_blocks, 4, preemption=policy, max_num_batched_tokens=16)
    outputs = llm.generate(mixed, params)
    check(outputs[1::2], expected)
    for ours, theirs in zip(outputs[::2], alone, strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    stats = llm.decoder.stats()
    assert stats["preemptions_total"] > 0
    assert (stats["preemptions_by_swap_total"] > 0) == (policy == "swap")


# --- BART


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the rules of bart-large-cnn."""
    rules = {"forced_bos_token_id": encdec.BOS, "forced_eos_token_id": encdec.EOS, "no_repeat_ngram_size": 3}
    return encdec.make_bart(tmp_path_factory.mktemp("bart") / "bart", generation=rules)


@pytest.fixture(scope="module")
def bart_reference(bart: Path) -> Reference:
    return Reference(bart)


@cache
def bart_beams(reference: Reference, search: Search, count: int, longest: int) -> list[Found]:
    """What transformers finds after the default decoder prompt, without its forced <BOS>."""
    found = []
    for prompt in text_prompts(count, longest=longest):
        theirs = search_translations(reference, prompt, [encdec.EOS], search, max_new_tokens=MAX_TOKENS + 1)
        assert all(tokens[0] == encdec.BOS for tokens in theirs.sequences)
        found.append(Found([tokens[1:] for tokens in theirs.sequences], theirs.scores))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("search", SAMPLED, ids=str)
def test_beams_of_bart_as_its_users_call_it(
    bart: Path, bart_reference: Reference, search: Search, options: dict[str, Any]
) -> None:
    """The default decoder prompt ends with a forced <BOS>, which counts for a sequence's length in the scores."""
    outputs = LLM(bart, **options).generate(text_prompts(4), search.params())
    check(outputs, bart_beams(bart_reference, search, 4, 90))


@pytest.mark.parametrize("search", SAMPLED, ids=str)
def test_beams_of_bart_after_a_decoder_prompt(bart: Path, bart_reference: Reference, search: Search) -> None:
    pairs: list[Any] = [
        {"encoder_prompt": prompt, "decoder_prompt": [encdec.EOS, encdec.BOS, *prompt[:3]]}
        for prompt in text_prompts(4)
    ]
    expected = [
        search_translations(bart_reference, pair["encoder_prompt"], pair["decoder_prompt"], search) for pair in pairs
    ]
    check(LLM(bart).generate(pairs, search.params()), expected)


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_beams_of_bart_when_blocks_are_scarce(bart: Path, bart_reference: Reference, policy: str) -> None:
    search, prompts = SEARCHES[3], text_prompts(5, longest=40)
    own = search.width * -(-(2 + MAX_TOKENS) // 4)
    num_blocks = own + -(-max(map(len, prompts)) // 4) + 1
    llm = llm_of_blocks(bart, num_blocks, 4, preemption=policy)
    check(llm.generate(prompts, search.params()), bart_beams(bart_reference, search, 5, 40))
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_the_encoder_runs_once_for_all_beams(bart: Path) -> None:
    llm = LLM(bart, block_size=4)
    before = encoder_computations.value
    prompt = text_prompts(2)[1]
    request_id = llm.add(prompt, Search(5).params())
    cross = -(-len(prompt) // 4)
    most = 0
    while not llm.step():
        llm.decoder.check_integrity()
        stats = llm.decoder.stats()
        if stats["requests_running"]:
            assert len(llm.decoder.blocks.get_cross_block_table(request_id)) == cross
            most = max(most, int(stats["kv_blocks_used"]))
    assert encoder_computations.value == before + 1
    assert most <= cross + 5 * -(-(2 + MAX_TOKENS) // 4)


# --- Whisper


@pytest.mark.parametrize("search", SAMPLED, ids=str)
def test_beams_of_whisper(search: Search, folder_of: FolderOf, reference_of: ReferenceOf) -> None:
    """With its suppressed tokens, those of the beginning and a language in the prompt."""
    reference, llm = reference_of("whisper"), LLM(folder_of("whisper"), max_num_batched_tokens=8, block_size=4)
    prompt, rules = whisper_prompt.build(llm.info, llm.text, language="de")
    clips = [sound(number) for number in range(3)]
    expected = [search_clip(reference, clip, prompt, search) for clip in clips]
    prompts: list[Any] = [{"prompt_token_ids": prompt, "multi_modal_data": {"audio": wav(clip)}} for clip in clips]
    before = encoder_computations.value
    check(llm.generate(prompts, search.params(**rules)), expected)
    assert encoder_computations.value == before + len(clips)


@torch.inference_mode()
def search_clip(reference: Reference, clip: Any, prompt: Sequence[int], search: Search) -> Found:
    """Whisper's own `generate` returns the best sequence alone, so often as it is asked for several: those are of the
    one that all models have."""
    extractor = AutoFeatureExtractor.from_pretrained(reference.info.folder)
    features = extractor(clip, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    options = search.options(decoder_input_ids=torch.tensor([list(prompt)]))
    out = GenerationMixin.generate(reference.model, features, **options)
    found = cut(reference, out.sequences, out.sequences_scores, len(prompt))
    best = reference.transcribe(
        clip,
        MAX_TOKENS,
        language="de",
        num_beams=search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
    )
    assert best == reference.strip(found.sequences[0])
    return found
