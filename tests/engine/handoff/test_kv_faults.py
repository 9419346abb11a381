"""The handoff of keys and values when something comes early, late, twice, wrong or never: nothing is left over."""

import dataclasses
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from common.messages import (
    KV_INPUT_ID,
    Failed,
    Generate,
    Grant,
    InputLayout,
    InputNeeded,
    KvOffer,
    Prefilled,
    Receipt,
    Resumed,
    Tokens,
)
from common.model_info import ModelInfo
from engine.core.decoder_engine import LEASE_S, DecoderEngine
from engine.handoff.offer_check import KvPart
from engine.state.events import Event
from engine.state.spec import Table
from tests.engine.cache.test_swapping import clips, pictures
from tests.engine.driving import FAR_S, Driver, Job, greedy, run, sampled, text
from tests.engine.handoff.handing_over import Pair, quick_engine

LENGTH = 14
JOB = text("r", LENGTH, greedy(4))


class IntakeHarness:
    """A receiver's engine with one prefilled request, and what a sender of that request has for it."""

    def __init__(self, info: ModelInfo, job: Job = JOB, **options: int) -> None:
        self.job = job
        self.sender = Driver(quick_engine(info, prefix_caching=False))
        self.sender.add(job, prefill_only=True)
        while not self.sender.engine.scheduler.running or not self._prefilled():
            self.sender.step()
        request = self.sender.engine.scheduler.running[0]
        self.described: KvOffer = self.sender.engine.kv_exporter.offer_check.describe(request)
        self.engine = quick_engine(info, **options)

    def _prefilled(self) -> bool:
        return self.sender.engine.scheduler.running[0].is_prefilled_here

    def add(self, attempt: int = 0) -> None:
        slots = self.job.slots(self.engine.info)
        name, token_ids, params = self.job.name, self.job.token_ids, self.job.params
        known = Generate(name, token_ids, slots, params, 0, list(self.job.resumed), attempt=attempt, prefilled=True)
        self.engine.add_request(known)

    def offer(
        self, attempt: int = 0, deadline_s: float = FAR_S, request_attempt: int = 0, **changes: object
    ) -> list[Event]:
        changes |= {"attempt": attempt, "deadline_s": deadline_s, "request_attempt": request_attempt}
        self.engine.offer(msgspec.structs.replace(self.described, **changes))
        return self.answers()

    def deliver(self, first: int, last: int, *, table: Table = "self", attempt: int = 0, part: int = 0) -> list[Event]:
        arriving = self.sender.engine.export_kv(self.job.name, table, first, last)
        assert arriving is not None
        return self.deliver_raw(arriving.wait(), first, table=table, attempt=attempt, part=part)

    def deliver_raw(
        self, tokens: torch.Tensor, first: int, *, table: Table = "self", attempt: int = 0, part: int = 0
    ) -> list[Event]:
        self.engine.deliver_kv(self.job.name, attempt, KvPart(part, table, first, tokens.clone()))
        return self.answers()

    def answers(self) -> list[Event]:
        events = self.engine.answer()
        self.engine.check_integrity()
        return events

    def finish(self) -> list[int]:
        """The request's tokens, once everything has come."""
        tokens: list[int] = []
        while not self.engine.is_empty():
            assert self.engine.has_work()
            for event in self.engine.step():
                tokens += event.token_ids if isinstance(event, Tokens) else []
            self.engine.check_integrity()
        return tokens


@pytest.fixture
def desk(tiny_llama: ModelInfo) -> IntakeHarness:
    return IntakeHarness(tiny_llama)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock so many seconds ahead."""
    began_s, ahead = time.monotonic(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: began_s + ahead[0])

    def advance(seconds: float) -> None:
        ahead[0] += seconds

    return advance


def expected(info: ModelInfo, job: Job = JOB) -> list[int]:
    return run(quick_engine(info), [job], watch=False).tokens[job.name, 0]


def kinds(events: list[Event]) -> list[str | type[Event]]:
    return [getattr(event, "status", type(event)) for event in events]


def test_parts_may_come_in_any_order_and_overlap(desk: IntakeHarness, tiny_llama: ModelInfo) -> None:
    desk.add()
    assert kinds(desk.offer()) == ["granted"]
    for part, (first, last) in enumerate([(6, 9), (11, 13), (0, 3), (2, 7), (8, 12)]):
        assert desk.deliver(first, last, part=part) == [Receipt("r", KV_INPUT_ID, 0, "stored", part)]
    assert desk.finish() == expected(tiny_llama)


def test_an_offer_may_come_before_its_request(desk: IntakeHarness) -> None:
    assert desk.offer() == []
    assert [desk.engine.stats()[name] for name in ("early_offers", "kv_offers_pending")] == [1, 0]
    desk.add()
    assert kinds(desk.answers()) == ["granted"]


def test_an_offer_and_a_part_after_the_end_are_cancelled(desk: IntakeHarness) -> None:
    desk.add()
    desk.offer()
    desk.engine.abort("r")
    assert desk.answers() == [Grant("r", KV_INPUT_ID, 0, "cancelled")]
    assert desk.offer() == [Grant("r", KV_INPUT_ID, 0, "cancelled")]
    assert desk.deliver(0, 3, part=7) == [Receipt("r", KV_INPUT_ID, 0, "cancelled", 7)]
    assert desk.engine.is_empty()


def test_what_comes_twice_changes_nothing(desk: IntakeHarness, tiny_llama: ModelInfo) -> None:
    desk.add()
    desk.offer()
    for _ in range(2):
        assert desk.deliver(0, 9) == [Receipt("r", KV_INPUT_ID, 0, "stored")]
    assert desk.engine.stats()["prefill_handoff_tokens_total"] == 9
    for _ in range(2):
        assert desk.deliver(9, 13, part=1) == [Receipt("r", KV_INPUT_ID, 0, "stored", 1)]
    assert len(desk.engine.kv_receiver.reserved) == 0
    assert desk.offer() == [Grant("r", KV_INPUT_ID, 0, "cached")], "it is here: nothing more is wanted"
    assert desk.finish() == expected(tiny_llama)


def test_a_newer_attempt_replaces_an_older_one(desk: IntakeHarness, tiny_llama: ModelInfo) -> None:
    desk.add()
    desk.offer()
    desk.deliver(0, 9)
    assert desk.offer(attempt=2)[0] == Grant("r", KV_INPUT_ID, 0, "cancelled")
    assert desk.deliver(9, 13) == [Receipt("r", KV_INPUT_ID, 0, "expired")]
    assert desk.offer(attempt=1) == [Grant("r", KV_INPUT_ID, 1, "cancelled")]
    desk.deliver(9, 13, attempt=2)
    assert len(desk.engine.kv_receiver.reserved) == 1, "what the older one has sent does not count"
    desk.deliver(0, 9, attempt=2)
    assert desk.finish() == expected(tiny_llama)


def test_a_lease_that_ends_frees_the_blocks_and_asks_again(desk: IntakeHarness, now: Callable[[float], None]) -> None:
    desk.add()
    assert kinds(desk.offer()) == ["granted"]
    assert desk.engine.next_deadline_s() == time.monotonic() + LEASE_S
    now(20.0)
    desk.deliver(0, 5)
    now(20.0)
    assert desk.answers() == [], "a part is a sign of life"
    assert kinds(desk.offer()) == ["granted"], "and so is the offer, again"
    now(20.0)
    assert desk.answers() == []
    now(20.0)
    assert desk.answers() == [Grant("r", KV_INPUT_ID, 0, "cancelled"), InputNeeded("r", KV_INPUT_ID)]
    assert desk.engine.blocks.num_used == 0
    assert desk.deliver(5, 13) == [Receipt("r", KV_INPUT_ID, 0, "expired")]
    assert desk.offer() == [Grant("r", KV_INPUT_ID, 0, "cancelled")]
    assert kinds(desk.offer(attempt=1)) == ["granted"]
    assert desk.engine.stats()["kv_leases_expired_total"] == 1


@pytest.mark.parametrize("early", [False, True])
def test_a_withdrawn_offer_frees_its_blocks_and_nothing_of_another_attempt(desk: IntakeHarness, early: bool) -> None:
    if not early:
        desk.add()
    desk.offer()
    desk.engine.withdraw("r", KV_INPUT_ID, 1)
    assert [desk.engine.stats()[name] for name in ("early_offers", "kv_reserved_requests")] == [early, not early]
    desk.engine.withdraw("r", KV_INPUT_ID, 0)
    desk.engine.withdraw("r", KV_INPUT_ID, 0)
    desk.answers()
    assert [desk.engine.stats()[name] for name in ("early_offers", "kv_reserved_requests")] == [0, 0]
    assert desk.engine.blocks.num_used == 0
    if not early:
        assert desk.offer() == [Grant("r", KV_INPUT_ID, 0, "cancelled")]
        assert kinds(desk.offer(attempt=1)) == ["granted"]


def test_what_is_computed_for_the_next_attempt_is_not_answered_by_the_one_before(desk: IntakeHarness) -> None:
    """A job comes back to its decode worker, and the prefill worker is faster than the proxy."""
    desk.add()
    desk.offer()
    desk.deliver(0, LENGTH - 1)
    assert desk.engine.scheduler.running, "the attempt before has all it needs"
    assert desk.offer(attempt=5, request_attempt=4) == [], "else the sender would take it for delivered"
    desk.engine.abort("r")
    desk.answers()
    desk.add(attempt=4)
    assert kinds(desk.answers()) == ["granted"]
    assert desk.offer(attempt=6, request_attempt=0) == [Grant("r", KV_INPUT_ID, 6, "cancelled")], "of the one before"


def test_an_offer_whose_deadline_passes_before_there_is_room_asks_again(
    tiny_llama: ModelInfo, now: Callable[[float], None]
) -> None:
    desk = IntakeHarness(tiny_llama, max_num_seqs=1)
    driver = Driver(desk.engine)
    driver.add(text("other", 6, greedy(30)))
    driver.step()
    desk.add()
    assert desk.offer(deadline_s=time.monotonic() + 5.0) == []
    now(6.0)
    assert desk.answers() == [Grant("r", KV_INPUT_ID, 0, "cancelled"), InputNeeded("r", KV_INPUT_ID)]
    assert (desk.engine.stats()["kv_offers_expired_total"], desk.engine.stats()["kv_leases_expired_total"]) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_tokens": LENGTH}, f"of {LENGTH} tokens, the request needs those of {LENGTH - 1}"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"token_shape": (3, 2, 2, 8)}, "do both serve the same model"),
        ({"num_encoder_tokens": 4}, "4 encoder tokens"),
        ({"layouts": [InputLayout(3, [])]}, "1 input layouts, the request has 0"),
    ],
)
def test_an_offer_that_does_not_fit_the_request_is_refused(
    desk: IntakeHarness, changes: dict[str, object], said: str
) -> None:
    desk.add()
    [event] = desk.offer(**changes)
    assert isinstance(event, Grant)
    assert event.status == "refused"
    assert said in event.error.message
    assert kinds(desk.offer()) == ["granted"], "a good one may still come"


def test_layouts_are_checked_as_those_of_inputs(tiny_vision: ModelInfo) -> None:
    desk = IntakeHarness(tiny_vision, pictures(tiny_vision)[1])
    desk.add()
    [layout] = desk.described.layouts
    more = InputLayout(layout.num_encoder_tokens + 1, layout.expansion, layout.grid)
    [event] = desk.offer(layouts=[more])
    assert isinstance(event, Grant)
    assert event.status == "refused"
    assert "input 0: 8 placeholders in the expansion for 9 encoder tokens" in event.error.message


def test_what_can_never_fit_is_refused_with_both_numbers(tiny_vision: ModelInfo) -> None:
    job = pictures(tiny_vision)[0]
    desk = IntakeHarness(tiny_vision, job, num_blocks=3)
    desk.add()
    refused, failed = desk.offer()
    assert isinstance(refused, Grant)
    assert refused.status == "refused"
    assert isinstance(failed, Failed)
    assert refused.error == failed.error
    assert "for 17 tokens, the whole pool holds 12" in refused.error.message
    assert desk.engine.is_empty()


@pytest.mark.parametrize(
    ("shape", "dtype", "first"),
    [
        ((3, 2, 2, 2, 16), torch.float32, 0),
        ((3, 3, 2, 2, 16), torch.float16, 0),
        ((3, 3, 2, 2, 16), torch.float32, LENGTH - 2),
        ((3, 3, 2, 2, 16), torch.float32, -1),
        ((0, 3, 2, 2, 16), torch.float32, 0),
    ],
    ids=["a layer less", "another dtype", "beyond the end", "before the start", "nothing"],
)
def test_a_part_that_is_not_what_was_granted_is_corrupt(
    desk: IntakeHarness, tiny_llama: ModelInfo, shape: tuple[int, ...], dtype: torch.dtype, first: int
) -> None:
    desk.add()
    desk.offer()
    before = [cache.clone() for cache in desk.engine.runner.caches]
    assert desk.deliver_raw(torch.ones(shape, dtype=dtype), first) == [Receipt("r", KV_INPUT_ID, 0, "corrupt")]
    assert all(torch.equal(old, new) for old, new in zip(before, desk.engine.runner.caches, strict=True))
    desk.deliver(0, 13)
    assert desk.finish() == expected(tiny_llama)


def test_the_prefix_cache_of_the_receiver_is_not_overwritten(desk: IntakeHarness, tiny_llama: ModelInfo) -> None:
    run(desk.engine, [dataclasses.replace(JOB, name="before")], watch=False)
    desk.add()
    [grant] = desk.offer()
    assert isinstance(grant, Grant)
    assert grant.status == "granted"
    assert grant.first_token == 12
    assert desk.deliver(0, 13) == [Receipt("r", KV_INPUT_ID, 0, "corrupt")]
    desk.deliver(12, 13)
    assert desk.finish() == expected(tiny_llama)


STAGES = ["queued", "offered", "granted", "halfway", "started", "decoding"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_speech"])
def test_an_abort_at_any_stage_leaves_nothing(model: str, stage: str, request: pytest.FixtureRequest) -> None:
    info: ModelInfo = request.getfixturevalue(model)
    desk = IntakeHarness(info, JOB if model == "tiny_llama" else clips(info)[1])
    name, step = desk.job.name, STAGES.index(stage)
    desk.add()
    if step >= 1:
        desk.offer()
    if step >= 3:
        desk.deliver(0, 2)
    if step >= 4:
        if desk.described.num_encoder_tokens:
            desk.deliver(0, desk.described.num_encoder_tokens, table="cross")
        desk.deliver(2, desk.described.num_tokens)
    if step >= 5:
        desk.engine.step()
        desk.engine.step()
    for engine in (desk.engine, desk.sender.engine):
        engine.abort(name)
        engine.answer()
        engine.check_integrity()
        assert engine.is_empty()
        assert engine.scheduler.reserved == engine.scheduler.running == []


def test_equal_content_is_sent_once_and_waited_for(tiny_speech: ModelInfo) -> None:
    """Two requests over one clip: the second one waits until the first one's cross table is here, and needs none."""
    first, second = clips(tiny_speech)[0], clips(tiny_speech)[3]
    assert first.media == second.media
    pair = Pair(quick_engine(tiny_speech), quick_engine(tiny_speech), part_tokens=4)
    pair.add(first)
    pair.add(second)
    assert pair.finish() == run(quick_engine(tiny_speech), [first, second], watch=False).tokens
    stats = pair.receiver.engine.stats()
    row_bytes = stats["kv_block_bytes"] / 4
    tokens = stats["prefill_handoff_tokens_total"] + first.media[0][1]
    assert stats["prefill_handoff_bytes_total"] == tokens * row_bytes
    assert stats["prefill_handoff_bytes_total"] == pair.sender.engine.stats()["kv_exported_bytes_total"]


def test_who_waited_for_equal_content_gets_its_own_when_the_first_is_aborted(tiny_speech: ModelInfo) -> None:
    first, second = clips(tiny_speech)[0], clips(tiny_speech)[3]
    pair = Pair(quick_engine(tiny_speech), quick_engine(tiny_speech), part_tokens=2)
    pair.add(first)
    pair.add(second)
    while pair.transfers[first.name].part < 3:
        pair.step()
    assert len(pair.receiver.engine.kv_receiver.reserved) == 1
    pair.give_up(first.name)
    expected = run(quick_engine(tiny_speech), [second], watch=False).tokens
    assert pair.finish() == expected


def test_what_the_receiver_has_is_not_sent(tiny_llama: ModelInfo) -> None:
    """The second of two prompts that begin alike: its first blocks are here, and only the others come."""
    one = text("one", 30, greedy(3))
    longer = Job("two", [*one.token_ids[:22], 9, 8, 7, 6], greedy(3))
    pair = Pair(quick_engine(tiny_llama, block_size=8), quick_engine(tiny_llama))
    for job in (one, longer):
        pair.add(job)
        pair.finish()
    stats = pair.receiver.engine.stats()
    assert stats["prefill_handoff_cached_tokens_total"] == 20
    assert stats["prefill_handoff_tokens_total"] == 29 + (25 - 20)
    assert stats["prefill_handoff_bytes_total"] == pair.sender.engine.stats()["kv_exported_bytes_total"]
    assert pair.receiver.ends["two", 0].num_cached_tokens == 16, "what was computed by nobody, on either side"
    assert pair.receiver.tokens == run(quick_engine(tiny_llama), [one, longer], watch=False).tokens


def test_a_prompt_that_is_here_as_a_whole_is_not_sent_at_all(tiny_speech: ModelInfo) -> None:
    clip = clips(tiny_speech)[0]
    job = dataclasses.replace(clip, name="one", token_ids=[*clip.token_ids[:1], *range(5, 13)])
    again = dataclasses.replace(job, name="two")
    pair = Pair(quick_engine(tiny_speech), quick_engine(tiny_speech))
    pair.add(job)
    pair.finish()
    sent = pair.sender.engine.stats()["kv_exported_bytes_total"]
    pair.add(again)
    tokens = pair.finish()
    assert tokens["two", 0] == tokens["one", 0]
    assert pair.sender.engine.stats()["kv_exported_bytes_total"] == sent
    assert Grant("two", KV_INPUT_ID, 0, "cached") in pair.receiver.events


@pytest.mark.parametrize("block_size", [3, 64])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_vision"])
def test_a_stream_goes_on_at_another_decode(model: str, block_size: int, request: pytest.FixtureRequest) -> None:
    """With one sequence the tokens so far are prefilled as well; with several only what they share. A block that the
    prompt does not fill may hold the end of a picture: none of them computes that here."""
    info: ModelInfo = request.getfixturevalue(model)
    for params in (sampled(12), sampled(12, n=3)):
        job = text("r", 9, params) if model == "tiny_llama" else dataclasses.replace(pictures(info)[0], params=params)
        whole = run(quick_engine(info), [job], watch=False).tokens
        resumed = [Resumed(index, whole[job.name, index][: 3 + index]) for index in range(params.n)]
        pair = Pair(quick_engine(info), quick_engine(info, block_size=block_size))
        pair.add(dataclasses.replace(job, resumed=resumed))
        assert pair.finish() == {key: tokens[3 + key[1] :] for key, tokens in whole.items()}
        again = 0 if params.n == 1 else sum(3 + index for index in range(params.n))
        assert pair.receiver.engine.stats()["recomputed_tokens_total"] == again


def test_the_last_of_several_sequences_goes_on_at_another_decode(tiny_llama: ModelInfo) -> None:
    job = text("r", 9, sampled(12, n=3))
    whole = run(quick_engine(tiny_llama), [job], watch=False).tokens
    pair = Pair(quick_engine(tiny_llama), quick_engine(tiny_llama))
    pair.add(dataclasses.replace(job, resumed=[Resumed(2, whole["r", 2][:3])]))
    assert pair.finish() == {("r", 2): whole["r", 2][3:]}


@pytest.mark.parametrize("granted", [False, True])
def test_a_sequence_may_stop_before_its_prompt_has_come(tiny_llama: ModelInfo, granted: bool) -> None:
    """The first one has the blocks: a sibling takes them over, and what has come stays."""
    job = text("r", LENGTH, sampled(8, n=3))
    whole = run(quick_engine(tiny_llama), [job], watch=False).tokens
    job = dataclasses.replace(job, resumed=[Resumed(index, whole["r", index][:2]) for index in range(3)])
    desk = IntakeHarness(tiny_llama, job)
    desk.add()
    if granted:
        desk.offer()
        desk.deliver(0, 5)
    desk.engine.stop_sequence("r", 0)
    desk.engine.check_integrity()
    if not granted:
        desk.offer()
        desk.deliver(0, 5)
    desk.deliver(5, LENGTH - 1)
    tokens: dict[int, list[int]] = {}
    while not desk.engine.is_empty():
        for event in desk.engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.index, []).extend(event.token_ids)
            else:
                assert event == Grant("r", KV_INPUT_ID, 0, "cancelled"), "the end of the handoff, with its request"
    assert tokens == {index: whole["r", index][2:] for index in (1, 2)}


def test_seeds_are_those_of_the_sender(tiny_llama: ModelInfo) -> None:
    """A request without a seed draws as it would have drawn where it was prefilled."""
    job = text("r", LENGTH, sampled(8, seed=None))
    desk = IntakeHarness(tiny_llama, job)
    assert desk.sender.engine.state.requests["r"].seed == desk.described.seed
    desk.add()
    desk.offer()
    desk.deliver(0, LENGTH - 1)
    seeded = dataclasses.replace(job, params=sampled(8, seed=desk.described.seed))
    assert desk.finish() == expected(tiny_llama, seeded)


def test_log_probabilities_of_the_prompt_are_waited_for(tiny_llama: ModelInfo) -> None:
    """The receiver may have everything long before the prefill knows what it was asked."""
    engine = quick_engine(tiny_llama, max_num_batched_tokens=4)
    driver = Driver(engine)
    driver.add(text("r", LENGTH, greedy(3, prompt_logprobs=0)), prefill_only=True)
    driver.step()
    engine.end_prefill("r")
    driver.finish()
    [ended] = [event for event in driver.events if isinstance(event, Prefilled)]
    assert len(ended.prompt_logprobs) == LENGTH
    assert all(one is not None for one in ended.prompt_logprobs[1:])


def test_ends_of_what_is_not_there_are_fine(tiny_llama: ModelInfo) -> None:
    engine: DecoderEngine = quick_engine(tiny_llama)
    engine.end_prefill("nobody")
    engine.grant_kv("nobody")
    assert engine.export_kv("nobody", "self", 0, 1) is None
    engine.add_request(Generate("r", [1, 2, 3], [], greedy(2)))
    engine.end_prefill("r")
    assert engine.export_kv("r", "self", 0, 1) is None
    while not engine.is_empty():
        engine.step()
    assert engine.stats()["generated_tokens_total"] == 2
