"""Requests of every kind through pools of any size: each says what it says alone, and nothing hangs or is left.

A request that outgrows the pool may end early, or be refused; what it has said by then is the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import EngineConfig
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Job, greedy, make_engine, run, sampled, text_tokens
from tests.equality.runs import kv_bytes

pytestmark = pytest.mark.slow

PICTURE_ROWS = {"cat": 4, "dog": 7, "sign": 3}
CLIPS = ("one", "two", "three")
_alone: dict[str, DecoderEngine] = {}


@dataclass(frozen=True)
class Sizes:
    """Of an engine: a pool of `num_blocks`, a host pool of `host_blocks`, an encoder cache of `cache_rows`; whether it
    launches steps ahead."""

    num_blocks: int
    block_size: int
    policy: str
    budget: int
    prefix_caching: bool
    host_blocks: int
    cache_rows: int
    ahead: bool

    def make(self, info: ModelInfo) -> DecoderEngine:
        block_bytes = kv_bytes(info, 1, self.block_size)
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "kv_cache_bytes": self.num_blocks * block_bytes,
            "preemption": self.policy,
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": 4,
            "prefix_caching": self.prefix_caching,
            "swap_bytes": self.host_blocks * block_bytes,
            "encoder_cache_bytes": self.cache_rows * 64 * 4,
            "async_scheduling": self.ahead,
        }
        return DecoderEngine(info, EngineConfig(**options))


@st.composite
def some_sizes(draw: st.DrawFn) -> Sizes:
    return Sizes(
        num_blocks=draw(st.integers(7, 26)),
        block_size=draw(st.integers(2, 5)),
        policy=draw(st.sampled_from(["recompute", "swap", "auto"])),
        budget=draw(st.integers(4, 20)),
        prefix_caching=draw(st.booleans()),
        host_blocks=draw(st.sampled_from([5, 60])),
        cache_rows=AUDIO_FRAMES + draw(st.integers(0, 9)),
        ahead=draw(st.booleans()),
    )


@st.composite
def some_params(draw: st.DrawFn) -> SamplingParams:
    limit, width = draw(st.integers(1, 10)), draw(st.integers(2, 4))
    kind = draw(st.sampled_from(["greedy", "sampled", "beams"]))
    if kind == "beams":
        return greedy(limit, n=draw(st.integers(1, width)), beam_width=width, length_penalty=0.7)
    return sampled(limit, seed=width, n=width - 1) if kind == "sampled" else greedy(limit)


@st.composite
def some_jobs(draw: st.DrawFn, model: str) -> list[Job]:
    """What they begin with repeats, so that some find blocks of others. Token 0 stands for a picture."""
    jobs = []
    for number in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 20 if model == "text" else 6))
        job = Job(f"j{number}", text_tokens(draw(st.integers(0, 1)), length), draw(some_params()))
        if model == "speech":
            job = replace(job, media=[(draw(st.sampled_from(CLIPS)), AUDIO_FRAMES)])
        for name in draw(st.lists(st.sampled_from(sorted(PICTURE_ROWS)), max_size=3)) if model == "pictures" else ():
            token_ids, media = [*job.token_ids, 0, *text_tokens(5, 3)], [*job.media, (name, PICTURE_ROWS[name])]
            job = replace(job, token_ids=token_ids, media=media)
        jobs.append(replace(job, priority=draw(st.integers(0, 1))))
    return jobs


def for_model(info: ModelInfo, job: Job) -> Job:
    if info.is_encoder_decoder:
        return replace(job, token_ids=[int(info.config["decoder_start_token_id"]), *job.token_ids])
    placeholder = info.placeholder_token_id or 0
    return replace(job, token_ids=[token or placeholder for token in job.token_ids])


def alone(info: ModelInfo, job: Job) -> dict[int, list[int]]:
    engine = _alone.setdefault(str(info.folder), make_engine(info, prefix_caching=False))
    return {index: tokens for (_, index), tokens in run(engine, [job], watch=False).tokens.items()}


def serve(driver: Driver, jobs: list[Job], seed: int) -> set[str]:
    """Requests come steps apart, their inputs in any order and some much later; some are aborted: their names."""
    rng, late, aborted = random.Random(seed), list[tuple[str, int]](), set[str]()
    for job in jobs:
        for _ in range(rng.choice((0, 0, 1, 4))):
            driver.step()
        driver.add(job, offer=False)
        for input_id in rng.sample(range(len(job.media)), len(job.media)):
            if rng.random() < 0.3:
                late.append((job.name, input_id))
            else:
                driver.offer(job.name, input_id)
    if rng.random() < 0.3:
        for _ in range(rng.randrange(6)):
            driver.step()
        aborted.add(rng.choice(jobs).name)
        driver.engine.abort(*aborted)
    for name, input_id in rng.sample(late, len(late)):
        for _ in range(rng.randrange(4)):
            driver.step()
        driver.offer(name, input_id)
    driver.finish()
    return aborted


def may_outgrow(driver: Driver, job: Job) -> bool:
    """Whether it could need the whole pool at its full length, its sequences sharing no more than the prompt."""
    blocks, rows = driver.engine.blocks, sum(count for _, count in job.media)
    is_cross = driver.engine.info.is_encoder_decoder
    length = len(job.token_ids) + (0 if is_cross else rows - len(job.media))
    lengths = [length + job.params.max_tokens] * job.params.num_sequences
    return not blocks.fits_ever(length, lengths, rows if is_cross else 0)


def check(info: ModelInfo, jobs: list[Job], sizes: Sizes, seed: int) -> None:
    jobs = [for_model(info, job) for job in jobs]
    expected = {job.name: alone(info, job) for job in jobs}
    driver = Driver(sizes.make(info))
    aborted = serve(driver, jobs, seed)
    for job in jobs:
        outgrows = may_outgrow(driver, job)
        if job.name in driver.failures:
            assert outgrows
        elif job.name not in aborted and not (outgrows and job.params.uses_beams):  # else the search may be shorter
            for index, tokens in expected[job.name].items():
                got = driver.tokens[job.name, index]
                early = outgrows and driver.ends[job.name, index].finish_reason == "length"
                assert got == (tokens[: len(got)] if early else tokens)
    assert driver.engine.blocks.host.pool.num_free == driver.engine.runner.num_host_blocks


@pytest.mark.parametrize("model", ["text", "pictures", "speech"])
def test_any_mix_gives_the_tokens_of_each_request_alone(model: str, request: pytest.FixtureRequest) -> None:
    fixtures = {"text": "tiny_llama", "pictures": "tiny_vision", "speech": "tiny_speech"}
    info: ModelInfo = request.getfixturevalue(fixtures[model])

    @given(jobs=some_jobs(model), sizes=some_sizes(), seed=st.integers(0, 999))
    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def any_mix(jobs: list[Job], sizes: Sizes, seed: int) -> None:
        check(info, jobs, sizes, seed)

    any_mix()
