"""Behind the attention of its last layer a decoder goes on with the tokens that the next ones are sampled behind."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages import Tokens
from common.model_info import ModelInfo, load_model_info
from engine.core.decoder_engine import DecoderEngine
from tests.engine.driving import Driver, Job, greedy, make_engine, text, text_tokens
from tests.tiny.gemma3 import make_gemma3

BUDGET = 24
"""Tokens of a step: a part of a prompt."""


@pytest.fixture(params=["tiny_llama", "tiny_vision", "gemma3"])
def info(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    if request.param == "gemma3":
        return load_model_info(str(make_gemma3(tmp_path_factory.mktemp("gemma3"))))
    found: ModelInfo = request.getfixturevalue(request.param)
    return found


def engine_of(info: ModelInfo) -> DecoderEngine:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": BUDGET, "prefix_caching": False}
    return make_engine(info, attention_backend="torch", num_blocks=60, **options)


def last_layer(engine: DecoderEngine) -> Any:
    layers: Any = engine.runner.model.layers
    return layers[-1]


def jobs_of(info: ModelInfo) -> list[Job]:
    return [Job(str(number), text_tokens(number, 45 - 7 * number), greedy(6)) for number in range(3)]


def answers(engine: DecoderEngine, jobs: list[Job]) -> Any:
    driver = Driver(engine)
    for job in jobs:
        driver.add(job)
    driver.finish()
    assert not driver.failures
    return driver.tokens


def test_the_last_layer_computes_the_rows_that_are_read(info: ModelInfo) -> None:
    engine = engine_of(info)
    computed: dict[str, list[int]] = {"first": [], "last": []}
    layers: Any = engine.runner.model.layers
    for name, layer in (("first", layers[0]), ("last", layers[-1])):
        layer.o_proj.register_forward_pre_hook(lambda _, inputs, name=name: computed[name].append(len(inputs[0])))
    answers(engine, jobs_of(info))
    assert max(computed["last"]) <= 3, "a row for each prompt that ends in the step, and for each decode"
    steps = zip(computed["first"], computed["last"], strict=True)
    assert (BUDGET, 1) in steps, "the first part of a prompt, which nothing is sampled behind"


def test_tokens_are_those_of_a_whole_last_layer(info: ModelInfo) -> None:
    whole = engine_of(info)
    last_layer(whole).is_last = False
    assert answers(engine_of(info), jobs_of(info)) == answers(whole, jobs_of(info))


def test_log_probabilities_of_a_prompt_are_of_all_its_rows(tiny_llama: ModelInfo) -> None:
    job = text("asked", 40, greedy(3, logprobs=1, prompt_logprobs=1))
    whole = engine_of(tiny_llama)
    last_layer(whole).is_last = False
    told = []
    for engine in (engine_of(tiny_llama), whole):
        driver = Driver(engine)
        for one in (job, text("beside", 30, greedy(5))):
            driver.add(one)
        driver.finish()
        messages = [event for event in driver.events if isinstance(event, Tokens)]
        told.append([one.logprob for event in messages for one in event.prompt_logprobs if one is not None])
    assert len(told[0]) == 39
    assert told[0] == pytest.approx(told[1], abs=1e-4)
