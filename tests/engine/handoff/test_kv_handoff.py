"""Prefill in one engine, decode in another: the tokens are those of one engine, and every token is computed once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.messages import Tokens
from common.model_info import ModelInfo
from common.sampling_params import Grammar
from engine.core.decoder_engine import DecoderEngine
from tests.engine.driving import Job, greedy, run, sampled, text, text_tokens
from tests.engine.handoff.handing_over import Pair, quick_engine

CLIP_ROWS = 18


def texts(_: ModelInfo) -> list[Job]:
    """Every way to choose tokens, and prompts from one token up to more than any chunk or part."""
    return [
        text("one token", 1, greedy(4)),
        text("two tokens", 2, sampled(4)),
        text("greedy", 33, greedy()),
        text("sampled", 12, sampled(seed=3)),
        text("several", 9, sampled(n=3)),
        text("beams", 14, greedy(6, n=2, beam_width=4)),
        text("reported", 21, sampled(6, logprobs=3, prompt_logprobs=2)),
        text("ruled", 8, greedy(8, repetition_penalty=1.3, no_repeat_ngram_size=2)),
        text("constrained", 6, greedy(8, ignore_eos=False, grammar=Grammar("regex", "[a-f]{3,6}"))),
    ]


def pictures(info: ModelInfo) -> list[Job]:
    """Pictures among text, at both ends of it, and the same one twice."""
    pad = info.placeholder_token_id or 0
    return [
        Job("middle", [*text_tokens(1, 3), pad, *text_tokens(2, 4)], greedy(), [("a", 6)]),
        Job("two", [*text_tokens(3, 2), pad, 7, pad, 8, 9], sampled(n=2), [("a", 6), ("b", 9)]),
        Job("first", [pad, *text_tokens(4, 5)], greedy(8), [("c", 5)]),
        Job("last", [*text_tokens(5, 5), pad], greedy(8), [("d", 4)]),
        Job("none", text_tokens(6, 7), sampled(6)),
        Job("reported", [*text_tokens(7, 3), pad, *text_tokens(8, 4)], sampled(4, prompt_logprobs=1), [("e", 3)]),
    ]


def tiles(info: ModelInfo) -> list[Job]:
    """Pictures that are read by cross-attention: of each one, text behind it sees some rows only."""
    return [
        replace(job, media=[(name, 5 * (1 + index)) for index, (name, _) in enumerate(job.media)])
        for job in pictures(info)
    ]


def clips(info: ModelInfo) -> list[Job]:
    start = int(info.config["decoder_start_token_id"])
    kinds = [greedy(), sampled(n=3), greedy(8, n=2, beam_width=3), greedy(6, logprobs=1, prompt_logprobs=1)]
    lengths = [0, 4, 1, 9]  # of the decoder prompt, behind its first token
    return [
        Job(f"clip {i}", [start, *text_tokens(i, lengths[i])], params, [("abca"[i], CLIP_ROWS)])
        for i, params in enumerate(kinds)
    ]


LOADS: dict[str, Callable[[ModelInfo], list[Job]]] = {
    "tiny_llama": texts,
    "tiny_qwen2_vl": pictures,
    "tiny_vision": pictures,
    "tiny_mllama": tiles,
    "tiny_speech": clips,
    "tiny_bart": clips,
    "tiny_t5": clips,
}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they are": ({}, {}),
    "small to large": ({"block_size": 3, "max_num_batched_tokens": 8}, {"block_size": 16}),
    "large to small": ({"block_size": 16, "max_num_batched_tokens": 16}, {"block_size": 1}),
}


def hand_over(prefill: DecoderEngine, decode: DecoderEngine, jobs: list[Job], part_tokens: int = 5) -> Pair:
    pair = Pair(prefill, decode, part_tokens=part_tokens)
    for job in jobs:
        pair.add(job)
    pair.finish()
    return pair


def told(events: list[Any], name: str) -> list[tuple[Any, ...]]:
    """All that is said of a request's tokens, apart from times and the log-probabilities of its prompt."""
    mine = [event for event in events if isinstance(event, Tokens) and event.request_id == name]
    return [
        (
            e.index,
            e.offset,
            e.token_ids,
            e.finish_reason,
            e.num_prompt_tokens,
            e.done,
            [one.token_id for one in e.logprobs],
        )
        for e in mine
    ]


def test_a_request_waits_until_its_keys_and_values_are_there(tiny_llama: ModelInfo) -> None:
    pair = Pair(quick_engine(tiny_llama), quick_engine(tiny_llama))
    pair.add(text("a", 9, greedy(4)))
    counts = []
    while not pair.receiver.engine.is_empty():
        stats = pair.receiver.engine.stats()
        counts.append((stats["requests_waiting"], stats["requests_running"]))
        pair.step()
    assert list(dict.fromkeys(counts)) == [(1, 0), (0, 1)]
    assert pair.receiver.engine.stats()["requests_waiting"] == 0


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", LOADS)
def test_two_engines_say_what_one_says(model: str, sizes: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    jobs, (prefill, decode) = LOADS[model](info), SIZES[sizes]
    expected = run(quick_engine(info), jobs, watch=False)
    pair = hand_over(quick_engine(info, **prefill), quick_engine(info, **decode), jobs)
    assert pair.receiver.tokens == expected.tokens
    for job in jobs:
        assert told(pair.receiver.events, job.name) == told(expected.events, job.name)
        known = next(
            event.prompt_logprobs
            for event in expected.events
            if event.request_id == job.name and isinstance(event, Tokens)
        )
        found = pair.sender.prompt_logprobs[job.name]
        assert [one and (one.token_id, one.rank) for one in found] == [
            one and (one.token_id, one.rank) for one in known
        ]
        assert [one.logprob for one in found if one] == pytest.approx([one.logprob for one in known if one], abs=1e-4)
    for engine in (pair.sender.engine, pair.receiver.engine):
        assert engine.stats()["preemptions_total"] == engine.stats()["recomputed_tokens_total"] == 0
        assert engine.is_empty()
