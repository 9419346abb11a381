"""First frames of tokens by dynamic time warping, and by the queries and keys of alignment heads."""

from __future__ import annotations

import numpy as np
import torch

from common.messages import Tokens
from common.model_info import ModelInfo
from common.sampling_params import Alignment
from engine.runner.alignment import first_frames, warp
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Job, greedy, make_engine, run


def slow_warp(cost: np.ndarray) -> float:
    """The cost of the cheapest path, cell by cell."""
    best = np.full((cost.shape[0] + 1, cost.shape[1] + 1), np.inf)
    best[0, 0] = 0
    for i in range(1, best.shape[0]):
        for j in range(1, best.shape[1]):
            best[i, j] = cost[i - 1, j - 1] + min(best[i - 1, j - 1], best[i - 1, j], best[i, j - 1])
    return float(best[-1, -1])


def test_the_path_follows_the_cheap_cells():
    cost = np.ones((4, 12))
    for row, (begin, end) in enumerate([(0, 3), (3, 4), (4, 9), (9, 12)]):
        cost[row, begin:end] = 0
    assert warp(cost) == [0, 3, 4, 9]
    assert warp(np.zeros((1, 5))) == [0]
    assert warp(np.zeros((3, 1))) == [0, 0, 0]


def test_the_path_is_the_cheapest_there_is():
    random = np.random.default_rng(0)
    for _ in range(20):
        cost = random.normal(size=(7, 15))
        entered = warp(cost)
        assert entered == sorted(entered)
        ends = [*entered[1:], 15]
        total = 0.0
        for row, (begin, end) in enumerate(zip(entered, ends, strict=True)):
            # The frame at which the next row begins belongs to it alone where the path steps down and right at once.
            spans = [cost[row, begin:stop].sum() for stop in {max(begin + 1, end), end + 1} if stop <= 15]
            total += min(spans)
        assert total <= slow_warp(cost) + 1e-9


def test_tokens_begin_where_their_heads_look():
    keys = torch.eye(40)[None].repeat(2, 1, 1) * 20
    begins = [0, 6, 15, 31]
    queries = torch.zeros(2, 5, 40)
    for row, (begin, end) in enumerate(zip(begins, [*begins[1:], 40], strict=True), 1):
        queries[:, row, begin:end] = 4.0
    assert np.abs(np.subtract(first_frames(queries, keys, 1), begins)).max() <= 1


def frames_of(driver: Driver) -> list[int | None]:
    told = [one for event in driver.events if isinstance(event, Tokens) for one in event.prompt_logprobs]
    return [None if one is None else one.frame for one in told]


def test_tokens_that_are_computed_again_keep_their_frames(tiny_speech: ModelInfo):
    """Beams tell of their prompt at the end: a preemption before has it computed again, a few tokens at a time."""
    params = greedy(3, beam_width=2, prompt_logprobs=0, alignment=Alignment(1, AUDIO_FRAMES))
    prompt = [int(tiny_speech.config["decoder_start_token_id"]), 57, 21, 59, 38, 29, 37]
    job = Job("r", prompt, params, [("one", AUDIO_FRAMES)])
    options = {"max_num_batched_tokens": 3, "preemption": "recompute", "prefix_caching": False}
    undisturbed, driver = run(make_engine(tiny_speech), [job]), Driver(make_engine(tiny_speech, **options))
    driver.add(job)
    scheduler = driver.engine.scheduler
    driver.step_while(lambda: not any(one.forked for one in scheduler.running))
    scheduler.preempt(scheduler.running[0])
    driver.finish()
    assert frames_of(driver) == frames_of(undisturbed)
    assert any(frames_of(undisturbed))
