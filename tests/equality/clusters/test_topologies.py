"""Every topology gives the tokens of every other, of `LLM` and of transformers; nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.messages import Role
from common.sampling_params import SamplingParams
from engine.llm import LLM, RequestOutput
from tests.equality.cases import MAX_TOKENS, Case, CasesOf, FolderOf
from tests.equality.runs import expected_of, prompt_of, strip
from tests.equality.served import Served, serve
from tools.soak import leak_check
from tools.soak.asks import WITHOUT_RULES

pytestmark = pytest.mark.cluster
SAMPLED: dict[str, Any] = {"n": 2, "temperature": 2.0, "seed": 5, "max_tokens": 12}
NUM_LOGPROBS = 2
ENCODING_ITSELF = {"inputs_encoding_here"}
"""Gauges that only a worker has which encodes its own inputs."""
CHUNK_TOKENS = 32
"""Of a prefill: prompts take several steps, and their keys and values leave in several parts."""


@dataclass(frozen=True)
class Setup:
    """A model, how it is spread, and roles with KV blocks of another size than the others' 16 tokens."""

    model: str
    topology: str
    block_sizes: dict[Role, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}-{self.topology}"


SETUPS = (
    Setup("signpost", "1epd"),
    Setup("signpost", "1e1pd"),
    Setup("signpost", "2e1pd"),
    Setup("signpost", "1e1p1d", {"decode": 8}),
    Setup("signpost", "2e2p2d"),
    Setup("whisper", "1epd"),
    Setup("whisper", "1e1p1d"),
    Setup("whisper", "2e2p2d", {"prefill": 8}),
    Setup("numerals", "1e1p1d"),
    Setup("florence2", "1epd"),
    Setup("florence2", "1e1pd"),
    Setup("llama", "1pd"),
    Setup("llama", "1p1d", {"prefill": 4, "decode": 32}),
)


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    assert isinstance(request.param, Setup)
    return request.param


@pytest.fixture(scope="module")
def served(setup: Setup, folder_of: FolderOf, broker_url: str) -> Iterator[Served]:
    sizes = {"kv_cache_bytes": 32 * 2**20, "encoder_cache_bytes": 8 * 2**20, "max_num_batched_tokens": CHUNK_TOKENS}
    spread = {"topology": setup.topology, "block_sizes": setup.block_sizes}
    with serve(folder_of(setup.model), broker_url, f"topology-{setup}", **spread, **sizes) as cluster:  # type: ignore[arg-type]
        yield cluster


@pytest.fixture
def cases(setup: Setup, cases_of: CasesOf) -> list[Case]:
    return cases_of(setup.model)


async def test_answers_equal_transformers_and_are_computed_once(
    served: Served, setup: Setup, cases: list[Case]
) -> None:
    apart = served.cluster.supervisor.plan.topology.decode > 0
    before = served.total("decode", "prefill_handoffs_total") if apart else 0.0
    answers = await served.answer_all(cases, MAX_TOKENS[setup.model])
    assert [answer.token_ids for answer in answers] == expected_of(cases)
    await served.wait_until_nothing_is_held()
    if apart:
        # A prompt of one token leaves a prefill worker nothing to compute.
        long = sum(answer.num_prompt_tokens != 1 for answer in answers)
        assert served.total("decode", "prefill_handoffs_total") - before >= long
        _check_that_nothing_was_computed_twice(served)


def _check_that_nothing_was_computed_twice(served: Served) -> None:
    assert served.total("decode", "recomputed_tokens_total") == 0
    assert served.total("decode", "preemptions_total") == 0
    assert served.total("prefill", "generated_tokens_total") == 0
    assert served.total("decode", "inputs_stored_total") == 0, "media go to the prefill worker alone"
    sent = served.total("prefill", "kv_exported_bytes_total")
    assert sent == served.total("decode", "prefill_handoff_bytes_total") > 0


async def test_sampled_choices_and_their_log_probabilities_equal_those_of_llm(
    served: Served, setup: Setup, cases: list[Case]
) -> None:
    if setup.model == "whisper":
        pytest.skip("a transcription has one choice")
    case, llm = cases[1], LLM(served.info.folder)
    chat = "messages" in case.http
    logprobs = {"logprobs": True, "top_logprobs": NUM_LOGPROBS} if chat else {"logprobs": NUM_LOGPROBS}
    choices = await served.choices(case, **SAMPLED, **logprobs)
    (expected,) = llm.generate(
        prompt_of(served.info, case), SamplingParams(**SAMPLED, logprobs=NUM_LOGPROBS, ignore_eos=True)
    )
    assert [choice.token_ids for choice in choices] == [one.token_ids for one in expected.outputs]
    assert len({tuple(choice.token_ids) for choice in choices}) == 2
    for choice, told in zip(choices, _logprobs(expected), strict=True):
        assert _told(choice) == pytest.approx(told, abs=1e-4)
    await served.wait_until_nothing_is_held()


async def test_beams_of_a_clip_are_those_of_llm(served: Served, setup: Setup, cases: list[Case]) -> None:
    if setup.model != "whisper":
        pytest.skip("test_more_families.py searches with the others")
    case, llm = cases[1], LLM(served.info.folder)
    fields = {"use_beam_search": True, "best_of": 3, "max_completion_tokens": 12, "return_token_ids": True}
    async with served.client() as client:
        create: Any = client.audio.transcriptions.create
        answer = await create(model=served.info.name, **case.http, extra_body={**fields, **WITHOUT_RULES})
    prompt, rules = prompt_of(served.info, case), {**case.rules, "temperature": 0.0, "max_tokens": 12}
    (expected,) = llm.generate(prompt, SamplingParams(beam_width=3, **rules))
    assert answer.token_ids == strip(served.info, expected.outputs[0].token_ids)
    (greedy,) = llm.generate(prompt, SamplingParams(**rules))
    assert greedy.outputs[0].token_ids != expected.outputs[0].token_ids, "the beams are not worth comparing"
    await served.wait_until_nothing_is_held()


async def test_work_is_spread_over_the_instances_of_a_role(served: Served, setup: Setup, cases: list[Case]) -> None:
    """Not over encoders: there each content has a home, and these few may all have the same."""
    if "2p" not in setup.topology:
        pytest.skip("one of each")
    await served.answer_all(cases, MAX_TOKENS[setup.model])
    done = {"prefill": "prefills_ended_total", "decode": "prefill_handoffs_total"}
    for instance in served.cluster.instances.values():
        if instance.role in done:
            assert served.gauges(instance.id)[done[instance.role]] > 0, f"{instance.id} has had nothing to do"


def test_every_gauge_of_what_is_held_is_told_by_some_instance(served: Served, setup: Setup) -> None:
    if setup.model != "signpost" or setup.topology not in ("1e1p1d", "1epd"):
        pytest.skip("all stages apart, and all in one: together they have every gauge")
    told = {name for instance_id in served.cluster.instances for name in served.gauges(instance_id)}
    wanted = ENCODING_ITSELF if setup.topology == "1epd" else set(leak_check.GAUGES) - ENCODING_ITSELF
    assert wanted <= told


def _logprobs(output: RequestOutput) -> list[list[float]]:
    return [[entry.logprob for entry in one.logprobs] for one in output.outputs]


def _told(choice: Any) -> list[float]:
    if hasattr(choice, "message"):
        return [entry.logprob for entry in choice.logprobs.content]
    return list(choice.logprobs.token_logprobs)
