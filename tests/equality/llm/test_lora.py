"""LoRA adapters: `LLM` generates what transformers generates with the adapter merged into the weights, in any mix."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.equality.adapters import make_adapters, mixed_cases, with_adapter
from tests.equality.cases import MAX_TOKENS, Case, FolderOf, ReferenceOf
from tests.equality.runs import answer_all, expected_of, llm_of_blocks, strip

SLOW = (
    "qwen2",
    "gemma3_text",
    "qwen3",
    "mistral",
    "gemma3",
    "qwen2_vl",
    "qwen3_vl",
    "llava",
    "idefics3",
    "qwen2_audio",
)
FAMILIES = ["llama", "qwen2_5_vl", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]


class Setup:
    """A tiny model with its adapters, and cases with and without these."""

    def __init__(self, name: str, folder: Path, adapters: dict[str, Path], cases: list[Case]) -> None:
        self.name, self.folder, self.adapters, self.cases = name, folder, adapters, cases
        self.max_tokens = MAX_TOKENS[name]

    def llm(self, **options: Any) -> LLM:
        return LLM(self.folder, lora_modules=self.adapters, **options)


@pytest.fixture(scope="module")
def setup_of(folder_of: FolderOf, reference_of: ReferenceOf, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str) -> Setup:
        adapters = make_adapters(reference_of(name), tmp_path_factory.mktemp(f"adapters-{name}"))
        return Setup(name, folder_of(name), adapters, mixed_cases(name, reference_of(name), adapters))

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_equals_merged_weights(setup_of: Any, name: str) -> None:
    setup = setup_of(name)
    llm = setup.llm()
    assert answer_all(llm, setup.cases, setup.max_tokens) == expected_of(setup.cases)
    assert llm.decoder.stats()["adapter_evictions_total"] == 0


@pytest.mark.parametrize("max_loras", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_more_adapters_than_places_take_turns(setup_of: Any, max_loras: int) -> None:
    setup = setup_of("llama")
    llm = setup.llm(max_loras=max_loras, max_num_batched_tokens=32, block_size=4)
    assert answer_all(llm, setup.cases, setup.max_tokens, steps_between=1) == expected_of(setup.cases)
    stats = llm.decoder.stats()
    assert stats["adapter_evictions_total"] == stats["adapter_loads_total"] - stats["adapters_loaded"] > 0


def test_a_pool_too_small_for_all_requests_gives_the_same_tokens(setup_of: Any) -> None:
    setup = setup_of("llama")
    longest = max(len(case.prompt) for case in setup.cases) + setup.max_tokens
    num_blocks = -(-longest // 8) + 2
    options = {"max_num_batched_tokens": 32, "max_loras": 2, "lora_modules": setup.adapters}
    llm = llm_of_blocks(setup.folder, num_blocks, 8, **options)
    assert answer_all(llm, setup.cases, setup.max_tokens, steps_between=1) == expected_of(setup.cases)
    assert llm.decoder.stats()["preemptions_total"] > 0


def test_the_overlapped_loop_gives_the_same_tokens(setup_of: Any) -> None:
    setup = setup_of("llama")
    llm = setup.llm(async_scheduling=True, max_loras=2)
    assert answer_all(llm, setup.cases, setup.max_tokens, steps_between=2) == expected_of(setup.cases)


def test_prefixes_are_found_again_for_the_same_adapter_alone(setup_of: Any) -> None:
    setup = setup_of("llama")
    llm, prompt = setup.llm(block_size=4), {"prompt_token_ids": list(range(40, 100))}
    answers = {}
    for adapter in ("", "whole", "scaled"):
        params = SamplingParams(temperature=0, max_tokens=8, adapter=adapter)
        first, again = (llm.generate(prompt, params)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 56), adapter
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        answers[adapter] = first.outputs[0].token_ids
    assert len({*map(tuple, answers.values())}) == 3


def test_several_sequences_and_beams_of_a_request_have_its_adapter(setup_of: Any, reference_of: ReferenceOf) -> None:
    setup = setup_of("llama")
    llm, case = (
        setup.llm(),
        next(case for case in setup.cases if case.rules.get("adapter") == "whole" and case.expected),
    )
    shared = {"adapter": "whole", "max_tokens": setup.max_tokens}
    prompt = {"prompt_token_ids": case.prompt}
    [sampled, beams] = llm.generate(
        [prompt, prompt],
        [SamplingParams(n=3, top_k=1, **shared), SamplingParams(beam_width=2, temperature=0, **shared)],
    )
    ends = llm.info.eos_token_ids
    assert all([token for token in one.token_ids if token not in ends] == case.expected for one in sampled.outputs)
    model = with_adapter(reference_of("llama"), "whole", setup.adapters["whole"]).model
    ids = torch.tensor([case.prompt])
    searched = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=2, max_new_tokens=setup.max_tokens)
    assert beams.outputs[0].token_ids == searched[0, len(case.prompt) :].tolist()


def test_prompt_logprobs_are_those_of_the_adapter(setup_of: Any, reference_of: ReferenceOf) -> None:
    setup, ids = setup_of("llama"), list(range(40, 70))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, adapter="scaled")
    [output] = setup.llm().generate({"prompt_token_ids": ids}, params)
    model = with_adapter(reference_of("llama"), "scaled", setup.adapters["scaled"]).model
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    told = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    assert told == pytest.approx([float(expected[at, token]) for at, token in enumerate(ids[1:])], abs=1e-4)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_adapters_stand_on_small_and_on_rounded_weights(setup_of: Any, options: dict[str, Any]) -> None:
    """Equal to the adapter alone in the same engine: what others of the batch have changes nothing."""
    setup = setup_of("llama")
    llm, prompts = setup.llm(**options), [{"prompt_token_ids": case.prompt} for case in setup.cases]
    params = [SamplingParams(temperature=0, max_tokens=1, logprobs=0, **case.rules) for case in setup.cases]
    alone = [llm.generate(prompt, one)[0].outputs[0].logprobs[0] for prompt, one in zip(prompts, params, strict=True)]
    together = [output.outputs[0].logprobs[0] for output in llm.generate(prompts, params)]
    exact = LLM(setup.folder, lora_modules=setup.adapters)
    full = [output.outputs[0].logprobs[0] for output in exact.generate(prompts, params)]
    for one, other, whole in zip(alone, together, full, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.1)
        if one.token_id == whole.token_id:
            assert one.logprob == pytest.approx(whole.logprob, abs=0.5)
    assert sum(one.token_id == whole.token_id for one, whole in zip(alone, full, strict=True)) > 0.7 * len(full)


def test_an_unknown_adapter_is_named_with_those_there_are(setup_of: Any) -> None:
    with pytest.raises(TriptychError, match=r"'other' does not exist here; .* has 'whole', 'scaled'") as caught:
        setup_of("llama").llm().generate({"prompt_token_ids": [50]}, SamplingParams(adapter="other"))
    assert (caught.value.info.code, caught.value.info.param) == ("model_not_found", "adapter")


def test_files_that_changed_since_the_start_fail_their_request_alone(setup_of: Any, tmp_path: Path) -> None:
    setup = setup_of("llama")
    moved = shutil.copytree(setup.adapters["scaled"], tmp_path / "scaled")
    llm = LLM(setup.folder, lora_modules={**setup.adapters, "scaled": moved}, async_scheduling=True)
    (moved / "adapter_config.json").write_text((setup.adapters["whole"] / "adapter_config.json").read_text())
    requests = [
        llm.add(
            {"prompt_token_ids": case.prompt}, SamplingParams(temperature=0, max_tokens=setup.max_tokens, **case.rules)
        )
        for case in setup.cases
    ]
    wanted = [case.rules.get("adapter") for case in setup.cases]
    num_failing, failures, answers = wanted.count("scaled"), list[str](), dict[str, list[int]]()
    while len(answers) + num_failing < len(requests):
        try:
            answers |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
        except TriptychError as error:
            failures.append(error.info.message)
    assert llm.decoder.stats()["requests_failed_total"] == num_failing
    assert failures
    assert all("'scaled' cannot be loaded: its files have changed" in message for message in failures)
    for request, case in zip(requests, setup.cases, strict=True):
        if case.rules.get("adapter") != "scaled":
            assert strip(llm.info, answers[request]) == case.expected
    assert llm.decoder.is_empty()
    llm.decoder.check_integrity()
