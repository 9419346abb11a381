"""The receiver's half of the handoff: what is promised holds, whatever comes early, late, twice or never."""

import random

import msgspec
import pytest
import torch

from common.config import EngineConfig
from common.messages import Grant, InputLayout, InputNeeded, InputSlot, Offer, Receipt
from common.sampling_params import SamplingParams
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool
from engine.cache.encoder_cache import EncoderCacheManager
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.offer_check import OfferCheck
from engine.scheduler.capacity import CacheLookup
from engine.scheduler.decoder import DecoderScheduler
from engine.state.engine_state import EngineState
from engine.state.events import Event
from engine.state.inputs import InputBuffers
from engine.state.request import InputState, Request, RequestInput

HIDDEN = 4
PAD = 9
FAR_S = 1e12


def output(rows: int, name: str = "h0", layout: InputLayout | None = None) -> Offer:
    """Of no request yet."""
    layout = layout or InputLayout(rows, [(PAD, rows)])
    return Offer("", 0, 0, name, "image", [rows, HIDDEN], "float32", rows * HIDDEN * 4, layout, "e0", FAR_S)


def tensor(rows: int) -> torch.Tensor:
    return torch.zeros(rows, HIDDEN)


class IntakeHarness:
    """An intake with a budget given in rows, and the events since the last look."""

    def __init__(self, budget_rows: int, lease_s: float = FAR_S) -> None:
        self.cache = EncoderCacheManager(budget_rows * HIDDEN * 4)
        offer_check = OfferCheck(HIDDEN, vocab_size=20, max_rows=50, placeholder=PAD)
        cache_lookup = CacheLookup(BlockManager(BlockPool(64), block_size=4), enabled=True)
        self.state = EngineState()
        self.intake = InputReceiver(self.state, self.cache, offer_check, cache_lookup, lease_s)
        self.requests: dict[str, Request] = {}

    def request(self, name: str, *hashes: str, attempt: int = 0) -> Request:
        prompt = [1, *[PAD for _ in hashes], 2]
        slots = [InputSlot(number, "image", content, number + 1) for number, content in enumerate(hashes)]
        arrival = len(self.requests)
        inputs = [RequestInput(slot) for slot in slots]
        request = Request(name, prompt, inputs, sampling=SamplingParams(), arrival=arrival, attempt=attempt)
        self.requests[name] = request
        self.intake.add_request(request)
        return request

    def offer(
        self, name: str, input_id: int, attempt: int, offer: Offer, deadline_s: float = FAR_S, request_attempt: int = 0
    ) -> None:
        changes = {"deadline_s": deadline_s, "request_attempt": request_attempt}
        key = {"request_id": name, "input_id": input_id, "attempt": attempt}
        self.intake.offer(msgspec.structs.replace(offer, **key, **changes))

    def granted(self) -> Request:
        """Add request "a" with one input, and grant an offer of three rows for that input."""
        request = self.request("a", "h0")
        self.offer("a", 0, 0, output(3))
        assert kinds(self.events()) == [("granted", "a")]
        return request

    def events(self) -> list[Event]:
        self.intake.grant()
        self.cache.check_integrity()
        return self.state.pop_output()

    def consume(self, request: Request) -> None:
        [sequence] = request.sequences
        sequence.num_computed_tokens = request.num_computable_tokens(sequence)
        self.intake.consume(request)


@pytest.fixture
def desk() -> IntakeHarness:
    """Return an intake with room for four rows."""
    return IntakeHarness(4)


def cover(desk: IntakeHarness, request: Request, num_cached: int) -> None:
    """As the scheduler does where the first tokens of a request are cached."""
    blocks = BlockManager(BlockPool(64), block_size=4)
    scheduler = DecoderScheduler(blocks, CacheLookup(blocks, enabled=True), InputBuffers(4, 64, 4), EngineConfig(), 64)
    scheduler._cover_inputs(request, num_cached)
    desk.intake.update(scheduler.pop_changed())


def kinds(events: list[Event]) -> list[tuple[str | type[Event], str]]:
    return [(getattr(event, "status", type(event)), event.request_id) for event in events]


def test_an_offer_is_granted_and_its_tensor_stored(desk: IntakeHarness) -> None:
    request = desk.granted()
    assert request.prompt == [1, PAD, PAD, PAD, 2]
    assert request.num_computable_tokens(request.sequences[0]) == 1
    desk.intake.deliver("a", 0, 0, tensor(3))
    assert kinds(desk.events()) == [("stored", "a")]
    assert request.num_computable_tokens(request.sequences[0]) == 5
    desk.consume(request)
    assert request.inputs[0].state is InputState.CONSUMED
    assert desk.cache.num_references == 0


def test_an_offer_may_come_before_its_request(desk: IntakeHarness) -> None:
    desk.offer("a", 0, 0, output(3))
    assert desk.events() == []
    desk.request("a", "h0")
    assert kinds(desk.events()) == [("granted", "a")]


def test_a_newer_offer_that_comes_early_replaces_the_older_one_and_says_so(desk: IntakeHarness) -> None:
    desk.offer("a", 0, 0, output(3))
    desk.offer("a", 0, 1, output(3))
    desk.offer("a", 0, 0, output(3))
    assert desk.events() == [Grant("a", 0, 0, "cancelled"), Grant("a", 0, 0, "cancelled")]
    desk.request("a", "h0")
    [granted] = desk.events()
    assert isinstance(granted, Grant)
    assert granted.status == "granted"
    assert granted.attempt == 1


def test_an_offer_after_its_request_has_ended_is_cancelled(desk: IntakeHarness) -> None:
    desk.intake.end_request(desk.request("a", "h0"))
    desk.offer("a", 0, 0, output(3))
    assert desk.events() == [Grant("a", 0, 0, "cancelled")]
    assert desk.intake.is_empty()


@pytest.mark.parametrize("granted", [False, True])
def test_a_withdrawn_offer_leaves_its_room_to_the_next_in_line(desk: IntakeHarness, granted: bool) -> None:
    first = desk.request("a", "h0")
    desk.request("b", "h1")
    desk.offer("a", 0, 0, output(3))
    if granted:
        desk.events()
    desk.offer("b", 0, 0, output(3, "h1"))
    for attempt in (1, 0, 0):  # of another attempt, of this one, and that once more
        desk.intake.withdraw("a", 0, attempt)
    assert kinds(desk.events()) == [("granted", "b")], "nobody is asked for the first one: its sender tells"
    assert first.inputs[0].state is InputState.MISSING
    desk.offer("a", 0, 0, output(3))
    assert desk.events() == [Grant("a", 0, 0, "cancelled")]
    desk.offer("a", 0, 1, output(3))
    assert first.inputs[0].state is InputState.OFFERED


def test_what_has_come_is_not_lost_with_a_late_withdrawal(desk: IntakeHarness) -> None:
    request = desk.granted()
    desk.intake.deliver("a", 0, 0, tensor(3))
    desk.intake.withdraw("a", 0, 0)
    assert request.inputs[0].state is InputState.READY
    desk.consume(request)
    assert request.inputs[0].state is InputState.CONSUMED


def test_an_offer_is_for_one_attempt_of_its_request_only(desk: IntakeHarness) -> None:
    request = desk.request("a", "h0", attempt=2)
    desk.offer("a", 0, 3, output(3), request_attempt=1)
    assert desk.events() == [Grant("a", 0, 3, "cancelled")]
    desk.offer("a", 0, 5, output(3), request_attempt=4)
    assert desk.events() == []
    desk.intake.end_request(request)
    desk.request("a", "h0", attempt=4)
    [granted] = desk.events()
    assert isinstance(granted, Grant)
    assert granted.status == "granted"
    assert granted.attempt == 5


def test_an_item_over_the_whole_budget_is_refused_with_both_numbers(desk: IntakeHarness) -> None:
    desk.request("a", "h0")
    desk.offer("a", 0, 0, output(5))
    [event] = desk.events()
    assert isinstance(event, Grant)
    assert event.status == "refused"
    assert event.error.code == "item_too_large"
    assert "80 bytes" in event.error.message
    assert "64" in event.error.message


@pytest.mark.parametrize(
    "layout",
    [
        InputLayout(3, [(PAD, 4)]),
        InputLayout(3, [(PAD, 5), (PAD, -2)]),
        InputLayout(3, [(PAD, 3), (99, 1)]),
        InputLayout(3, [(PAD, 3), (1, 10**9)]),
        InputLayout(3, []),
        InputLayout(3, [(PAD, 3)], (1, 2, 2)),
        InputLayout(0, []),
    ],
    ids=["too many", "negative", "unknown token", "endless", "none", "other grid", "nothing"],
)
def test_an_offer_that_does_not_fit_the_model_is_refused(desk: IntakeHarness, layout: InputLayout) -> None:
    request = desk.request("a", "h0")
    rows = layout.num_encoder_tokens
    desk.offer("a", 0, 0, output(rows, layout=layout))
    [event] = desk.events()
    assert isinstance(event, Grant)
    assert event.status == "refused"
    assert event.error.code == "invalid_request"
    assert request.prompt == [1]


def test_ending_a_request_tells_the_encoder_that_holds_its_grant(desk: IntakeHarness) -> None:
    request = desk.granted()
    desk.intake.end_request(request)
    assert desk.events() == [Grant("a", 0, 0, "cancelled")]


def test_equal_content_is_sent_once(desk: IntakeHarness) -> None:
    desk.request("a", "h0")
    desk.request("b", "h0")
    for name in "ab":
        desk.offer(name, 0, 0, output(3))
    assert kinds(desk.events()) == [("granted", "a")]
    desk.intake.deliver("a", 0, 0, tensor(3))
    assert kinds(desk.events()) == [("stored", "a"), ("cached", "b")]
    assert desk.cache.used_bytes == 3 * HIDDEN * 4


def test_who_waited_for_equal_content_gets_a_grant_when_the_first_is_aborted(desk: IntakeHarness) -> None:
    first = desk.request("a", "h0")
    desk.request("b", "h0")
    for name in "ab":
        desk.offer(name, 0, 0, output(3))
    desk.events()
    desk.intake.end_request(first)
    assert kinds(desk.events()) == [("cancelled", "a"), ("granted", "b")]
    desk.intake.deliver("a", 0, 0, tensor(3))
    assert desk.events() == [Receipt("a", 0, 0, "cancelled")]


def test_messages_that_come_twice_change_nothing() -> None:
    desk = IntakeHarness(8)
    desk.request("a", "h0")
    for _ in range(2):
        desk.offer("a", 0, 0, output(3))
        assert kinds(desk.events()) == [("granted", "a")]
    for _ in range(2):
        desk.intake.deliver("a", 0, 0, tensor(3))
        assert kinds(desk.events()) == [("stored", "a")]
    assert desk.cache.used_bytes == 3 * HIDDEN * 4


def test_a_lease_that_runs_out_gives_its_room_back_and_asks_again() -> None:
    desk = IntakeHarness(4, lease_s=-1.0)
    desk.granted()
    desk.intake.expire(FAR_S / 2)
    assert desk.events() == [Grant("a", 0, 0, "cancelled"), InputNeeded("a", 0)]
    assert (desk.intake.counters["leases_expired"], desk.intake.counters["offers_expired"]) == (1, 0)
    assert desk.cache.used_bytes == 0
    desk.intake.deliver("a", 0, 0, tensor(3))
    assert desk.events() == [Receipt("a", 0, 0, "expired")]
    desk.offer("a", 0, 1, output(3))
    assert kinds(desk.events()) == [("granted", "a")]


def test_an_offer_that_finds_no_room_by_its_deadline_asks_again_and_is_counted_apart(desk: IntakeHarness) -> None:
    desk.request("a", "h0")
    desk.request("b", "h1")
    desk.offer("a", 0, 0, output(3))
    desk.offer("b", 0, 0, output(3, "h1"), 5.0)
    desk.events()
    desk.intake.expire(6.0)
    assert desk.events() == [Grant("b", 0, 0, "cancelled"), InputNeeded("b", 0)]
    assert (desk.intake.counters["leases_expired"], desk.intake.counters["offers_expired"]) == (0, 1)


def test_an_entry_that_is_given_up_for_another_is_counted_and_one_that_is_found_is_not(desk: IntakeHarness) -> None:
    for name, content in (("a", "h0"), ("b", "h1"), ("c", "h1")):
        request = desk.request(name, content)
        desk.offer(name, 0, 0, output(3, content))
        if name != "c":
            desk.events()
            desk.intake.deliver(name, 0, 0, tensor(3))
        desk.events()
        desk.consume(request)
    assert desk.cache.counters == {"encoder_cache_evictions": 1, "encoder_cache_hits": 1}


def test_who_repeats_an_offer_whose_lease_ran_out_is_told_again() -> None:
    desk = IntakeHarness(4, lease_s=-1.0)
    desk.granted()
    desk.intake.expire(FAR_S / 2)
    desk.events()
    desk.offer("a", 0, 0, output(3))
    assert desk.events() == [Grant("a", 0, 0, "cancelled")]


def test_an_offer_of_what_the_kv_cache_still_has_is_answered_as_cached(desk: IntakeHarness) -> None:
    request = desk.granted()
    request.inputs[0].state = InputState.DORMANT  # preempted after its input had been consumed
    desk.offer("a", 0, 0, output(3))
    assert Grant("a", 0, 0, "cached") in desk.state.outbox


def test_a_tensor_that_is_not_what_was_granted_is_corrupt(desk: IntakeHarness) -> None:
    desk.granted()
    desk.intake.deliver("a", 0, 0, tensor(2))
    assert desk.events() == [Receipt("a", 0, 0, "corrupt")]
    desk.intake.deliver("a", 0, 0, tensor(3))
    assert kinds(desk.events()) == [("stored", "a")]


def test_an_input_whose_place_in_the_prompt_is_not_known_yet_is_kept_however_far_the_prefill_is(
    desk: IntakeHarness,
) -> None:
    request = desk.request("a", "h0", "h1")
    desk.offer("a", 1, 0, output(1, "h1"))
    desk.events()
    desk.intake.deliver("a", 1, 0, tensor(1))
    desk.consume(request)  # the token in front of both: as many as the second input has
    assert request.inputs[1].state is InputState.READY
    cover(desk, request, num_cached=1)
    assert request.inputs[1].state is InputState.READY


def test_what_is_cached_covers_no_input_whose_place_is_not_known_yet(desk: IntakeHarness) -> None:
    request = desk.request("a", "h0", "h1")
    desk.offer("a", 1, 0, output(1, "h1"))
    cover(desk, request, num_cached=1)
    assert request.inputs[1].state is InputState.OFFERED


def test_room_is_promised_in_the_order_of_requests_not_of_offers(desk: IntakeHarness) -> None:
    for name in "abc":
        desk.request(name, f"h-{name}")
    for name in "cba":
        desk.offer(name, 0, 0, output(3, f"h-{name}"))
    assert kinds(desk.events()) == [("granted", "a")]
    desk.intake.deliver("a", 0, 0, tensor(3))
    desk.events()
    desk.consume(desk.requests["a"])
    assert kinds(desk.events()) == [("granted", "b")]


def test_later_pictures_that_came_first_make_room_for_the_next_one(desk: IntakeHarness) -> None:
    request = desk.request("a", "h0", "h1", "h2")
    for number in (2, 1):
        desk.offer("a", number, 0, output(2, f"h{number}"))
    desk.events()
    for number in (1, 2):
        desk.intake.deliver("a", number, 0, tensor(2))
    desk.offer("a", 0, 0, output(2))
    desk.events()
    assert desk.intake.revoke(only_blocked=False)
    assert kinds(desk.events()) == [(InputNeeded, "a"), ("granted", "a")]
    assert [item.state for item in request.inputs] == [InputState.GRANTED, InputState.READY, InputState.MISSING]


@pytest.mark.parametrize("last", ["h0", "h2"], ids=["shared with one that keeps its room", "too small"])
def test_nothing_is_taken_back_where_that_makes_too_little_room(last: str) -> None:
    """It would be back at once, out of the cache, be taken back again, and so on."""
    desk = IntakeHarness(3)
    request = desk.request("a", "h0", "h1", last)
    for number, content in ((0, "h0"), (2, last)):
        desk.offer("a", number, 0, output(2 if content == "h0" else 1, content))
    desk.events()
    for number, item in enumerate(request.inputs):
        if item.state is InputState.GRANTED:
            desk.intake.deliver("a", number, 0, tensor(2 if item.slot.content_hash == "h0" else 1))
    desk.offer("a", 1, 0, output(2, "h1"))
    desk.events()
    assert [item.state for item in request.inputs] == [InputState.READY, InputState.OFFERED, InputState.READY]
    assert not desk.intake.revoke(only_blocked=False)
    assert desk.events() == []


@pytest.mark.parametrize("seed", range(30))
def test_any_burst_drains_within_its_budget(seed: int) -> None:
    """Offers in any order, tensors early, late, twice or lost: every request gets all its inputs, in its own order."""
    rng = random.Random(seed)
    desk = IntakeHarness(budget_rows=6)
    sizes: dict[tuple[str, int], int] = {}
    for number in range(rng.randint(2, 8)):
        hashes = [rng.choice(["shared", f"{number}-{i}"]) for i in range(rng.randint(1, 4))]
        name = f"r{number}"
        desk.request(name, *hashes)
        for i, content in enumerate(hashes):
            sizes[name, i] = 2 if content == "shared" else rng.randint(1, 6)
    attempts = dict.fromkeys(sizes, 0)
    outbox: list[tuple[str, tuple[str, int]]] = [("offer", key) for key in sizes]
    for _ in range(5000):
        if all(item.state is InputState.CONSUMED for r in desk.requests.values() for item in r.inputs):
            break
        events = desk.events()
        runnable = [r for r in desk.requests.values() if r.num_remaining(r.sequences[0]) > 0]
        for event in events:
            key = (event.request_id, getattr(event, "input_id", 0))
            if isinstance(event, Grant) and event.status == "granted":
                outbox.append(("tensor", key))
            elif isinstance(event, InputNeeded):
                attempts[key] += 1
                outbox.append(("offer", key))
        if outbox:
            kind, key = outbox.pop(rng.randrange(len(outbox)))
            content = desk.requests[key[0]].inputs[key[1]].slot.content_hash
            if rng.random() < 0.2:
                outbox.append((kind, key))  # sent twice
            if kind == "offer":
                desk.offer(*key, attempts[key], output(sizes[key], content))
            elif rng.random() < 0.1:
                desk.intake.expire(FAR_S * 2) if desk.intake.granted else None
            else:
                desk.intake.deliver(*key, attempts[key], tensor(sizes[key]))
        elif desk.intake.granted:
            desk.intake.expire(FAR_S * 2)
        elif not runnable and not events:
            assert desk.intake.revoke(only_blocked=False), "nothing moves"
        if runnable:
            desk.consume(rng.choice(runnable))
        assert desk.cache.used_bytes <= desk.cache.capacity_bytes
    for request in desk.requests.values():
        assert all(item.state is InputState.CONSUMED for item in request.inputs)
        desk.intake.end_request(request)
    desk.events()
    assert desk.intake.is_empty()
