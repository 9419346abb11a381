"""Prefill in one engine, decode in another: the tokens are those of one engine, and every token is computed once."""

import pytest

from common.model_info import ModelInfo
from tests.engine.driving import greedy, make_engine, run, sampled, text
from tests.engine.handing_over import Pair
from tests.engine.test_swapping import clips, pictures


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_vision", "tiny_speech"])
def test_two_engines_give_the_tokens_of_one(model: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    texts = [
        text("a", 12, greedy()),
        text("b", 33, sampled()),
        text("c", 9, sampled(n=3)),
        text("d", 5, greedy(n=2, beam_width=3)),
    ]
    jobs = {"tiny_llama": lambda _: texts, "tiny_vision": pictures, "tiny_speech": clips}[model](info)
    expected = run(make_engine(info), jobs).tokens
    pair = Pair(make_engine(info, max_num_batched_tokens=16), make_engine(info, block_size=6))
    for job in jobs:
        pair.add(job)
    assert pair.finish() == expected
