"""The decoder engine: what one request gets does not depend on its neighbours, chunks, blocks or luck."""

import time

import pytest
import torch

from common.config import EngineConfig
from common.messages import Failed, Generate, Grant, InputLayout, InputNeeded, InputSlot, Tokens
from common.model_info import ModelInfo, load_model_info
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event
from tests import tiny_models
from tests.engine.driving import make_offer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FAR_S = 1e12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("llama")
    tiny_models.make_llama(path)
    return load_model_info(str(path))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("vision")
    tiny_models.make_qwen2_5_vl(path)
    return load_model_info(str(path))


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_for(info: ModelInfo, **options: int) -> DecoderEngine:
    return DecoderEngine(info, EngineConfig(**{"max_num_seqs": 8, **options}))


def drain(engine: DecoderEngine, events: list[Event] | None = None) -> dict[str, list[int]]:
    """Step until empty; tokens by request. Every event is kept in `events`."""
    tokens: dict[str, list[int]] = {}
    deadline = time.monotonic() + 60
    while not engine.is_empty() or engine.has_work():
        assert time.monotonic() < deadline, engine.stats()
        for event in engine.step():
            engine.check_integrity()
            if events is not None:
                events.append(event)
            if isinstance(event, Tokens):
                got = tokens.setdefault(event.request_id, [])
                assert event.offset == len(got)
                got.extend(event.token_ids)
    return tokens


def alone(info: ModelInfo, token_ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    if info.name not in _REFERENCES:
        _REFERENCES[info.name] = engine_for(info)
    engine = _REFERENCES[info.name]
    engine.add_request(Generate("alone", token_ids, [], params))
    return drain(engine)["alone"]


_REFERENCES: dict[str, DecoderEngine] = {}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"block_size": 1},
        {"block_size": 5, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    ],
    ids=["default", "chunks of 7", "blocks of 1", "odd sizes"],
)
def test_a_batch_gives_what_each_request_gives_alone(llama: ModelInfo, options: dict[str, int]) -> None:
    prompts = [prompt(seed, 3 + seed * 5) for seed in range(6)]
    engine = engine_for(llama, **options)
    for number, token_ids in enumerate(prompts):
        engine.add_request(Generate(str(number), token_ids, [], GREEDY))
    tokens = drain(engine)
    assert [tokens[str(number)] for number in range(6)] == [alone(llama, p) for p in prompts]


def test_preempted_requests_give_the_same_tokens(llama: ModelInfo) -> None:
    prompts = [prompt(seed, 12) for seed in range(4)]
    block_bytes = int(engine_for(llama, block_size=4).stats()["kv_block_bytes"])
    engine = engine_for(llama, block_size=4, kv_cache_bytes=block_bytes * 11)
    for number, token_ids in enumerate(prompts):
        engine.add_request(Generate(str(number), token_ids, [], GREEDY))
    tokens = drain(engine)
    assert engine.stats()["preemptions_total"] > 0
    assert [tokens[str(number)] for number in range(4)] == [alone(llama, p) for p in prompts]


def test_requests_that_arrive_while_others_run_change_nothing(llama: ModelInfo) -> None:
    prompts = [prompt(seed, 9) for seed in range(3)]
    engine = engine_for(llama)
    tokens: dict[str, list[int]] = {}
    for number, token_ids in enumerate(prompts):
        engine.add_request(Generate(str(number), token_ids, [], GREEDY))
        for _ in range(4):
            for event in engine.step():
                assert isinstance(event, Tokens)
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
    for request_id, rest in drain_rest(engine).items():
        tokens[request_id].extend(rest)
    assert [tokens[str(number)] for number in range(3)] == [alone(llama, p) for p in prompts]


def drain_rest(engine: DecoderEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while not engine.is_empty():
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


def test_a_seed_gives_the_same_tokens_whatever_the_batch(llama: ModelInfo) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.95, top_k=40, seed=11, max_tokens=12, ignore_eos=True)
    first = alone(llama, prompt(1, 6), params)
    engine = engine_for(llama)
    for number in range(5):
        engine.add_request(Generate(str(number), prompt(number, 6), [], params))
    assert drain(engine)["1"] == first
    other = SamplingParams(temperature=1.3, top_p=0.95, top_k=40, seed=12, max_tokens=12, ignore_eos=True)
    assert alone(llama, prompt(1, 6), other) != first


def test_top_k_of_one_is_greedy(llama: ModelInfo) -> None:
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=12, ignore_eos=True)
    assert alone(llama, prompt(3, 6), params) == alone(llama, prompt(3, 6))


def test_forced_suppressed_and_stop_tokens(llama: ModelInfo) -> None:
    free = alone(llama, prompt(2, 6))
    forced = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prefix_allowed=((7,), (8, 9)))
    tokens = alone(llama, prompt(2, 6), forced)
    assert tokens[0] == 7
    assert tokens[1] in (8, 9)
    suppressed = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, suppress_tokens=(free[0],))
    assert free[0] not in alone(llama, prompt(2, 6), suppressed)
    begin = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, begin_suppress_tokens=(free[0],))
    assert alone(llama, prompt(2, 6), begin)[0] != free[0]
    stop = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(free[4],))
    assert alone(llama, prompt(2, 6), stop) == free[: free.index(free[4]) + 1]


def test_an_abort_frees_everything_at_once(llama: ModelInfo) -> None:
    engine = engine_for(llama)
    for number in range(4):
        engine.add_request(Generate(str(number), prompt(number, 20), [], GREEDY))
    engine.step()
    for number in range(4):
        engine.abort(str(number))
    engine.abort("never heard of")
    assert engine.is_empty()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("token_ids", "code", "words"),
    [
        ([], "invalid_request", "empty"),
        ([1, 10**6], "invalid_request", "1000000"),
        ([5] * 5000, "context_length_exceeded", "5000 tokens"),
    ],
)
def test_what_cannot_be_served_fails_with_the_value(
    llama: ModelInfo, token_ids: list[int], code: str, words: str
) -> None:
    engine = engine_for(llama)
    engine.add_request(Generate("bad", token_ids, [], GREEDY))
    engine.add_request(Generate("good", prompt(1, 4), [], GREEDY))
    events: list[Event] = []
    tokens = drain(engine, events)
    failures = [event for event in events if isinstance(event, Failed)]
    assert [failure.error.code for failure in failures] == [code]
    assert words in failures[0].error.message
    assert tokens["good"] == alone(llama, prompt(1, 4))


def test_a_sequence_that_outgrows_the_pool_ends_with_length(llama: ModelInfo) -> None:
    block_bytes = int(engine_for(llama, block_size=4).stats()["kv_block_bytes"])
    engine = engine_for(llama, block_size=4, kv_cache_bytes=block_bytes * 5)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine.add_request(Generate("long", prompt(1, 10), [], long))
    engine.add_request(Generate("never", prompt(1, 30), [], long))
    events: list[Event] = []
    tokens = drain(engine, events)
    assert tokens["long"] == alone(llama, prompt(1, 10), long)[: len(tokens["long"])]
    assert 10 + len(tokens["long"]) == 21
    [failure] = [event for event in events if isinstance(event, Failed)]
    assert failure.request_id == "never"


# --- inputs


def rows(info: ModelInfo, seed: int, count: int) -> torch.Tensor:
    hidden = int(info.text_config["hidden_size"])
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


def with_pictures(info: ModelInfo, name: str, counts: list[int]) -> tuple[list[int], list[InputSlot]]:
    token_ids, slots = prompt(1, 3), []
    for number, _ in enumerate(counts):
        slots.append(InputSlot(number, "image", f"{name}-{number}", len(token_ids)))
        token_ids += [info.placeholder_token_id or 0, *prompt(number, 4)]
    return token_ids, slots


def offer(engine: DecoderEngine, info: ModelInfo, slot: InputSlot, name: str, count: int, attempt: int = 0) -> None:
    hidden = int(info.text_config["hidden_size"])
    layout = InputLayout(count, [(info.placeholder_token_id or 0, count)], (1, 1, count))
    engine.offer(make_offer((name, slot.input_id, attempt), count, hidden, layout, slot.content_hash))


def run_pictures(
    info: ModelInfo, engine: DecoderEngine, jobs: dict[str, list[int]], *, order: int = 1, slow: int = 0
) -> dict[str, list[int]]:
    """Serve requests with pictures of jobs[name] rows each, offered in `order`, delivered `slow` steps late."""
    slots_by_name = {}
    for name, counts in jobs.items():
        token_ids, slots = with_pictures(info, name, counts)
        slots_by_name[name] = slots
        engine.add_request(Generate(name, token_ids, slots, GREEDY))
        for slot in slots[::order]:
            offer(engine, info, slot, name, counts[slot.input_id])
    tokens: dict[str, list[int]] = {}
    in_flight: list[tuple[int, Grant]] = []
    attempts: dict[tuple[str, int], int] = {}
    for step in range(3000):
        if engine.is_empty():
            break
        for event in engine.step():
            engine.check_integrity()
            if isinstance(event, Grant) and event.status == "granted":
                in_flight.append((step + slow, event))
            elif isinstance(event, InputNeeded):
                key = (event.request_id, event.input_id)
                attempts[key] = attempts.get(key, 0) + 1
                slot = slots_by_name[event.request_id][event.input_id]
                offer(engine, info, slot, event.request_id, jobs[event.request_id][event.input_id], attempts[key])
            elif isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        for due, granted in [pair for pair in in_flight if pair[0] <= step]:
            count = jobs[granted.request_id][granted.input_id]
            engine.deliver(granted.request_id, granted.input_id, granted.attempt, rows(info, granted.input_id, count))
            in_flight.remove((due, granted))
    assert engine.is_empty(), engine.stats()
    return tokens


def test_a_prompt_is_prefilled_up_to_its_first_missing_picture(vision: ModelInfo) -> None:
    engine = engine_for(vision)
    token_ids, slots = with_pictures(vision, "r", [5])
    engine.add_request(Generate("r", token_ids, slots, GREEDY))
    engine.step()
    assert engine.stats()["last_step_tokens"] == 3
    assert not engine.has_work()
    offer(engine, vision, slots[0], "r", 5)
    [granted] = engine.step()
    assert isinstance(granted, Grant)
    assert granted.status == "granted"
    engine.deliver("r", 0, 0, rows(vision, 0, 5))
    engine.step()
    assert engine.stats()["last_step_tokens"] == 9
    engine.abort("r")
    assert engine.is_empty()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"block_size": 4, "max_num_seqs": 2}])
@pytest.mark.parametrize("order", [1, -1])
def test_pictures_in_any_order_and_any_chunks_give_the_same_tokens(
    vision: ModelInfo, options: dict[str, int], order: int
) -> None:
    jobs = {"a": [4, 7], "b": [9], "c": [2, 3, 5]}
    expected = {name: run_pictures(vision, engine_for(vision), {name: jobs[name]})[name] for name in jobs}
    assert run_pictures(vision, engine_for(vision, **options), jobs, order=order, slow=2) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_a_burst_through_a_cache_of_one_picture_drains(vision: ModelInfo, order: int) -> None:
    """Later pictures granted first give their room back; preempted requests ask for their pictures again."""
    hidden = int(vision.text_config["hidden_size"])
    jobs = {f"r{number}": [6, 8, 3] for number in range(6)}
    expected = run_pictures(vision, engine_for(vision), {"r0": jobs["r0"]})["r0"]
    block_bytes = int(engine_for(vision, block_size=4).stats()["kv_block_bytes"])
    engine = engine_for(
        vision, block_size=4, encoder_cache_bytes=8 * hidden * 4, kv_cache_bytes=block_bytes * 16, max_num_seqs=4
    )
    tokens = run_pictures(vision, engine, jobs, order=order, slow=1)
    assert tokens == dict.fromkeys(jobs, expected)
    assert engine.stats()["encoder_cache_bytes_peak"] <= 8 * hidden * 4
    assert engine.stats()["preemptions_total"] > 0


def test_requests_that_wait_for_pictures_do_not_keep_others_out(vision: ModelInfo) -> None:
    """Every slot is taken by requests whose pictures never come; a text request passes all the same."""
    engine = engine_for(vision, max_num_seqs=2)
    for number in range(4):
        token_ids, slots = with_pictures(vision, f"r{number}", [5])
        engine.add_request(Generate(f"r{number}", token_ids, slots, GREEDY))
    engine.step()
    assert engine.stats()["requests_running"] == 2
    engine.add_request(Generate("text", prompt(1, 8), [], GREEDY))
    got: list[int] = []
    while engine.has_work():
        for event in engine.step():
            assert isinstance(event, Tokens)
            got += event.token_ids
        engine.check_integrity()
    assert got == alone(vision, prompt(1, 8))
    assert engine.stats()["requests_running"] == 2
    for number in range(4):
        engine.abort(f"r{number}")
    assert engine.is_empty()


@pytest.mark.parametrize("neighbour", ["prefix only", "always decoding"])
def test_an_early_picture_gets_in_although_later_ones_hold_the_room(vision: ModelInfo, neighbour: str) -> None:
    """Pictures 1 and 2 fill the cache before picture 0 is offered, beside a neighbour that keeps the engine busy."""
    hidden = int(vision.text_config["hidden_size"])
    engine = engine_for(vision, encoder_cache_bytes=6 * hidden * 4)
    token_ids, slots = with_pictures(vision, "late", [3, 3, 3])
    engine.add_request(Generate("late", token_ids, slots, GREEDY))
    for number in (1, 2):
        offer(engine, vision, slots[number], "late", 3)
    engine.step()
    for number in (1, 2):
        engine.deliver("late", number, 0, rows(vision, number, 3))
    engine.step()
    if neighbour == "prefix only":
        busy_ids, busy_slots = with_pictures(vision, "busy", [3])
        engine.add_request(Generate("busy", busy_ids, busy_slots, GREEDY))
    else:
        endless = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        engine.add_request(Generate("busy", prompt(5, 8), [], endless))
    offer(engine, vision, slots[0], "late", 3)
    granted: list[Event] = []
    for _ in range(20):
        if not engine.has_work():
            break
        granted += [event for event in engine.step() if isinstance(event, Grant) and event.status == "granted"]
        engine.check_integrity()
    assert [(event.request_id, event.input_id) for event in granted] == [("late", 0)]
    assert engine.stats()["inputs_revoked_total"] == 1
