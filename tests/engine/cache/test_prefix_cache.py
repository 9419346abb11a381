"""Prefix caching: what begins alike is computed, encoded and sent once; what only looks alike is not."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.messages import Tokens
from common.model_info import ModelInfo
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool
from engine.core.encoder_engine import encoder_computations
from engine.llm import LLM
from engine.state.prefix import extend_hashes
from tests import tiny_models
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.driving import Driver, Job, greedy, make_engine, run, sampled, text, text_tokens
from tests.media_files import encoded, noise, sound_file, tone

SIZE = 4


def cached_tokens(driver: Driver, name: str) -> int:
    [last] = [event for event in driver.events if isinstance(event, Tokens) and event.done]
    return last.num_cached_tokens if last.request_id == name else -1


def hit_tokens(driver: Driver) -> tuple[float, float]:
    stats = driver.engine.stats()
    return stats["prefix_hit_tokens_total"], stats["prefix_queried_tokens_total"]


def picture_job(info: ModelInfo, name: str, content: str, *, before: int = 6, rows: int = 9) -> Job:
    """Text, a picture of `rows` tokens, text: the same for every name."""
    token_ids = [*text_tokens(1, before), info.placeholder_token_id or 0, *text_tokens(2, 5)]
    return Job(name, token_ids, greedy(6), [(content, rows)])


def clip_job(info: ModelInfo, name: str, content: str, *, length: int = 9, **fields: Any) -> Job:
    start = int(info.config["decoder_start_token_id"])
    return Job(name, [start, *text_tokens(3, length)], greedy(6, **fields), [(content, AUDIO_FRAMES)])


# --- tokens


def test_requests_with_equal_prompts_share_blocks(tiny_llama: ModelInfo) -> None:
    """A prompt of 21 tokens has five full blocks; the second request takes them, the third one four of them."""
    first = text("a", 21, greedy(6))
    longer = replace(first, name="b", token_ids=[*first.token_ids, 7, 8])
    shorter = replace(first, name="c", token_ids=first.token_ids[:20])
    for job, hits in [(first, 0), (longer, 20), (shorter, 16)]:
        engine = make_engine(tiny_llama)
        driver = run(engine, [first])
        before, queried = hit_tokens(driver)
        assert before == 0
        driver.events.clear()
        driver.add(replace(job, name="again"))
        driver.step()
        assert engine.stats()["last_step_tokens"] == len(job.token_ids) - (hits or 20)
        driver.finish()
        assert cached_tokens(driver, "again") == (hits or 20)
        assert hit_tokens(driver) == ((hits or 20), queried + len(job.token_ids))
        alone = run(make_engine(tiny_llama), [job], watch=False)
        assert driver.tokens["again", 0] == alone.tokens[job.name, 0]


def test_running_requests_hold_what_they_share_once(tiny_llama: ModelInfo) -> None:
    engine = make_engine(tiny_llama)
    driver = Driver(engine)
    job = text("a", 21, greedy(4))
    driver.add(job)
    driver.step()
    for number in range(5):
        driver.add(replace(job, name=f"again {number}"))
    driver.step()
    tables = [engine.blocks.tables[name] for one in engine.scheduler.running for name in one.sequence_ids]
    assert len(tables) == 6
    assert all(table[:5] == tables[0][:5] for table in tables)
    assert engine.stats()["kv_blocks_used"] == 5 + 6
    driver.finish()
    assert len(set(map(tuple, driver.tokens.values()))) == 1


def test_what_was_generated_is_found_by_the_next_turn(tiny_llama: ModelInfo) -> None:
    driver = run(make_engine(tiny_llama), [text("a", 10, greedy(8))])
    [answer] = driver.tokens.values()
    driver.events.clear()
    driver.add(replace(driver.jobs["a"], name="b", token_ids=[*driver.jobs["a"].token_ids, *answer, 9, 9, 9]))
    driver.finish()
    assert cached_tokens(driver, "b") == 16  # 17 tokens have keys and values: the last one was never computed


def test_a_prompt_whose_logprobs_are_wanted_is_computed(tiny_llama: ModelInfo) -> None:
    job = text("a", 21, greedy(6, prompt_logprobs=0))
    engine = make_engine(tiny_llama)
    first, second = run(engine, [job]), run(engine, [replace(job, name="b")])
    assert hit_tokens(second)[0] == 0
    told = [
        [one for event in driver.events if isinstance(event, Tokens) for one in event.prompt_logprobs]
        for driver in (first, second)
    ]
    assert [len(one) for one in told] == [21, 21]
    assert told[0] == told[1]


def test_switched_off_nothing_is_shared(tiny_llama: ModelInfo) -> None:
    engine = make_engine(tiny_llama, prefix_caching=False)
    run(engine, [text("a", 21, greedy(6))])
    driver = run(engine, [replace(text("a", 21, greedy(6)), name="b")])
    assert hit_tokens(driver) == (0, 42)
    assert engine.stats()["kv_blocks_cached"] == 0


prompts = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=10)


@given(prompts=prompts, num_blocks=st.integers(8, 40), staggered=st.booleans())
@settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
def test_tokens_are_the_same_with_and_without_it(
    tiny_llama: ModelInfo, prompts: list[tuple[int, int, int]], num_blocks: int, *, staggered: bool
) -> None:
    """Prompts of two families with tails of three kinds, at once or one after another, in pools of any size."""
    jobs = []
    for number, (family, length, tail) in enumerate(prompts):
        params = sampled(6, n=2) if tail == 1 and num_blocks > 24 else greedy(6)
        jobs.append(Job(f"j{number}", [*text_tokens(family, length), *[70 + tail] * tail], params))
    found = []
    for caching in (False, True):
        driver = Driver(make_engine(tiny_llama, num_blocks, prefix_caching=caching))
        for job in jobs:
            driver.add(job)
            for _ in range(3 if staggered else 0):
                driver.step()
        found.append(driver.finish())
    assert found[0] == found[1]


# --- what is given up


def chain(*token_ids: int) -> list[bytes]:
    return hashes_of(token_ids, len(token_ids), [])


def hashes_of(
    token_ids: ListOf[int],
    num_tokens: int,
    spans: ListOf[tuple[int, int, str]],
    content: str = "",
    *,
    uses_mrope: bool = False,
    adapter: str = "",
    known: ListOf[bytes] = (),
) -> list[bytes]:
    """Return the chain of the first `num_tokens` tokens, with inputs at `spans` (start, end, content)."""
    inputs = [SimpleNamespace(start=a, end=b, slot=SimpleNamespace(content_hash=name)) for a, b, name in spans]
    sampling = SimpleNamespace(adapter=adapter)
    request: Any = SimpleNamespace(uses_mrope=uses_mrope, encoder_content=content, sampling=sampling, inputs=inputs)
    sequence: Any = SimpleNamespace(token_ids=list(token_ids), hashes=list(known))
    return extend_hashes(request, sequence, num_tokens, SIZE)


def test_least_recently_used_blocks_go_first_and_of_a_prompt_its_tail() -> None:
    manager = BlockManager(BlockPool(13), SIZE)
    names = {seed: chain(*[seed] * 12) for seed in (1, 2, 3, 4)}  # three blocks each: all twelve
    for seed, hashes in names.items():
        manager.allocate(seed, 12)
        manager.remember(seed, 0, hashes)
    for seed in (2, 1, 4, 3):
        manager.free(seed)
    manager.allocate(5, 12, names[2])  # used again: the last to go
    manager.free(5)
    assert manager.num_cached == 12
    kept = []
    for number in range(12):
        manager.allocate(100 + number, SIZE)
        manager.check_integrity()
        kept.append([manager.match_prefix(names[seed]) for seed in (1, 4, 3, 2)])
    assert kept[:4] == [[2, 3, 3, 3], [1, 3, 3, 3], [0, 3, 3, 3], [0, 2, 3, 3]]
    assert kept[8:] == [[0, 0, 0, 3], [0, 0, 0, 2], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert manager.counters["prefix_evictions"] == 12


def test_blocks_in_use_are_never_given_up() -> None:
    manager = BlockManager(BlockPool(7), SIZE)
    hashes = chain(*range(12))
    manager.allocate(0, 12)
    manager.remember(0, 0, hashes)
    manager.allocate(1, 12, hashes[:2])
    manager.free(0)
    assert manager.num_free == 3
    assert manager.missing_blocks(12, prefix=hashes[:2]) == 1
    manager.allocate(2, 12)
    assert manager.match_prefix(hashes) == 2
    assert manager.num_free == 0


@given(
    tokens=st.lists(st.integers(0, 300), min_size=4, max_size=40),
    start=st.integers(0, 30),
    rows=st.integers(1, 20),
    place=st.integers(0, 39),
)
def test_a_chain_names_tokens_inputs_and_all_before_them(tokens: list[int], start: int, rows: int, place: int) -> None:
    """One changed token, another picture or another root change every hash from there on, and none before it."""
    place %= len(tokens)
    inputs, count = [(start, start + rows, "picture")], len(tokens)
    made = {
        "one": hashes_of(tokens, count, inputs),
        "token": hashes_of([*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]], count, inputs),
        "picture": hashes_of(tokens, count, [(start, start + rows, "another")]),
        "root": hashes_of(tokens, count, inputs, "clip+18"),
        "grid": hashes_of(tokens, count, inputs, uses_mrope=True),
        "adapter": hashes_of(tokens, count, inputs, adapter="polite"),
    }
    whole = len(tokens) // SIZE
    assert [len(one) for one in made.values()] == [whole] * len(made)
    first_change = {"token": place // SIZE, "picture": start // SIZE, "root": 0, "grid": 0, "adapter": 0}
    for name, first in first_change.items():
        same = [a == b for a, b in zip(made["one"], made[name], strict=True)]
        assert same == [index < first for index in range(whole)]
    in_two_parts = hashes_of(tokens, count, inputs, known=hashes_of(tokens, place, inputs))
    assert in_two_parts == made["one"]


# --- pictures


def test_the_same_picture_is_neither_sent_nor_prefilled_again(tiny_vision: ModelInfo) -> None:
    engine = make_engine(tiny_vision, encoder_cache_bytes=9 * 64 * 4)
    driver = run(engine, [picture_job(tiny_vision, "a", "cat")])
    run(engine, [picture_job(tiny_vision, "other", "dog", before=7)])  # the only place of the encoder cache
    driver.events.clear()
    driver.add(picture_job(tiny_vision, "b", "cat"))
    driver.step()
    assert driver.num_cached_inputs == 1
    assert engine.stats()["last_step_tokens"] == 20 - 16
    driver.finish()
    assert driver.num_sent == 1
    assert engine.stats()["inputs_covered_total"] == 1
    assert driver.tokens["a", 0] == driver.tokens["b", 0]


def test_different_pictures_with_equal_tokens_share_only_what_is_before_them(tiny_vision: ModelInfo) -> None:
    engine = make_engine(tiny_vision)
    driver = run(engine, [picture_job(tiny_vision, "a", "cat")])
    driver.events.clear()
    driver.add(picture_job(tiny_vision, "b", "dog"))
    driver.finish()
    assert cached_tokens(driver, "b") == 4  # six tokens of text: one full block
    assert driver.num_sent == 2
    alone = run(make_engine(tiny_vision), [picture_job(tiny_vision, "b", "dog")])
    assert driver.tokens["b", 0] == alone.tokens["b", 0]
    assert driver.tokens["a", 0] != driver.tokens["b", 0]


def test_a_picture_that_is_only_partly_cached_is_sent(tiny_vision: ModelInfo) -> None:
    """Its last rows are in the block that both requests fill differently."""
    job = picture_job(tiny_vision, "a", "cat", rows=11)  # ends at token 17
    engine = make_engine(tiny_vision, encoder_cache_bytes=11 * 64 * 4)
    driver = run(engine, [job])
    run(engine, [picture_job(tiny_vision, "other", "dog", before=7)])
    driver.events.clear()
    driver.add(replace(job, name="b", token_ids=[*job.token_ids[:-4], 9, 9, 9, 9]))
    driver.finish()
    assert cached_tokens(driver, "b") == 16
    assert driver.num_sent == 2


def test_llm_encodes_a_picture_once_for_all_its_requests(tiny_vision: ModelInfo) -> None:
    llm = LLM(tiny_vision.folder, block_size=5, encoder_cache_bytes=50 * 64 * 4)
    placeholder = llm.info.placeholder_token_id or 0

    def ask(number: int, seed: int) -> list[int]:
        prompt: Any = {
            "prompt_token_ids": [5, placeholder, *text_tokens(number, 20)],
            "multi_modal_data": {"image": encoded(noise(196, 196, seed))},
        }
        [output] = llm.generate([prompt], greedy(4))
        return output.outputs[0].token_ids

    before = encoder_computations.value
    ask(0, seed=1)
    ask(0, seed=2)  # takes the room of the first in the encoder cache
    assert encoder_computations.value == before + 2
    ask(0, seed=1)
    ask(1, seed=1)
    assert encoder_computations.value == before + 2
    assert llm.decoder.stats()["inputs_covered_total"] == 2


# --- clips


def test_decoder_prompts_are_shared_only_over_the_same_clip(tiny_speech: ModelInfo) -> None:
    engine = make_engine(tiny_speech)
    driver = run(engine, [clip_job(tiny_speech, "a", "one")])
    for name, content, expected in [("b", "one", 8), ("c", "two", 0)]:
        driver.events.clear()
        driver.add(clip_job(tiny_speech, name, content))
        driver.finish()
        assert cached_tokens(driver, name) == expected
        alone = run(make_engine(tiny_speech), [clip_job(tiny_speech, name, content)])
        assert driver.tokens[name, 0] == alone.tokens[name, 0]
    assert driver.tokens["a", 0] == driver.tokens["b", 0] != driver.tokens["c", 0]


def test_a_clip_is_neither_sent_nor_projected_again_while_it_is_cached(tiny_speech: ModelInfo) -> None:
    """Eight requests at once hold its keys and values once; a ninth, after all have ended, finds them."""
    engine = make_engine(tiny_speech, encoder_cache_bytes=AUDIO_FRAMES * 64 * 4)
    cross = -(-AUDIO_FRAMES // 4)
    driver = Driver(engine)
    for number in range(8):
        driver.add(clip_job(tiny_speech, f"r{number}", "clip", length=1 + number))
    driver.step_while(lambda: len(engine.scheduler.running) < 8)
    tables = {tuple(engine.blocks.get_cross_block_table(f"r{number}")) for number in range(8)}
    assert [len(table) for table in tables] == [cross]
    own = {block for one in engine.scheduler.running for block in engine.blocks.held_blocks(one.sequence_ids)}
    assert engine.stats()["kv_blocks_used"] == cross + len(own)
    driver.finish()
    assert driver.num_sent == 1
    run(engine, [clip_job(tiny_speech, "other", "other clip")])  # the only place of the encoder cache
    driver.events.clear()
    driver.add(clip_job(tiny_speech, "ninth", "clip", length=8))
    driver.finish()
    assert driver.num_sent == 1
    assert driver.num_cached_inputs == 1
    assert driver.tokens["ninth", 0] == driver.tokens["r7", 0]
    assert engine.stats()["cross_table_hits_total"] == 8


def test_a_clip_whose_blocks_were_needed_is_sent_again(tiny_speech: ModelInfo) -> None:
    engine = make_engine(tiny_speech, 16, encoder_cache_bytes=AUDIO_FRAMES * 64 * 4)
    driver = run(engine, [clip_job(tiny_speech, "a", "clip")])
    for number in range(3):
        run(engine, [clip_job(tiny_speech, f"other {number}", f"other {number}")])
    assert not engine.blocks.has_cross(f"clip+{AUDIO_FRAMES}")
    driver.add(clip_job(tiny_speech, "b", "clip"))
    driver.finish()
    assert driver.num_sent == 2
    assert driver.tokens["a", 0] == driver.tokens["b", 0]


def test_llm_encodes_a_clip_once_for_eight_requests(tiny_speech_30s: LLM) -> None:
    llm = tiny_speech_30s
    clips = [sound_file(tone(1.0 + 0.1 * number)) for number in range(2)]
    start = int(llm.info.config["decoder_start_token_id"])

    def transcribe(clip: bytes, count: int) -> list[list[int]]:
        prompts: Any = [
            {"prompt_token_ids": [start, 40 + number], "multi_modal_data": {"audio": clip}} for number in range(count)
        ]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(5))]

    before = encoder_computations.value
    eight = transcribe(clips[0], 8)
    assert encoder_computations.value == before + 1
    transcribe(clips[1], 1)
    assert transcribe(clips[0], 8) == eight
    assert encoder_computations.value == before + 2


@pytest.fixture(scope="module")
def tiny_speech_30s(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With the encoder that goes with clips of 30 s, and room for one of them in the encoder cache."""
    folder = tiny_models.make_whisper(tmp_path_factory.mktemp("whisper"))
    return LLM(folder, encoder_cache_bytes=1500 * 64 * 4)
