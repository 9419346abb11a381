"""The receiver's half of the handoff in a world where anything may come, at any time, as often as it likes.

The intake and the encoder cache are those of the engine. Around them stands everything that encoders, the owner of the
media, the network and the scheduler could do: what may be sent once may be sent again later (duplication, delay, any
order) and need never be sent (loss). A tensor is filled with the number of its content, so that it can be told where
it has ended up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from common.messages import Grant, InputLayout, InputNeeded, InputSlot, Offer, Receipt
from common.sampling_params import SamplingParams
from engine.cache.block_manager import BlockManager
from engine.cache.block_pool import BlockPool
from engine.cache.encoder_cache import EncoderCacheManager
from engine.handoff.input_receiver import InputReceiver
from engine.handoff.offer_check import OfferCheck
from engine.scheduler.capacity import CacheLookup
from engine.state.engine_state import EngineState
from engine.state.events import Event
from engine.state.request import InputState, Request, RequestInput
from tests.model.copying import copy_sharing
from tests.model.explore import Action

HIDDEN = 2
PAD = 9
FAR_S = 1e12
"""Deadlines pass when the world says so."""
ROW_BYTES = HIDDEN * 4
SAMPLING = SamplingParams()
OFFER_CHECK = OfferCheck(HIDDEN, vocab_size=20, max_rows=50, placeholder=PAD)
CROSS_OFFER_CHECK = OfferCheck(HIDDEN, vocab_size=20, max_rows=50, placeholder=None, cross_attention=True)
_tensors: dict[tuple[str, int], torch.Tensor] = {}
"""What encoders make of each content: another number for each."""
CACHE_LOOKUP = CacheLookup(BlockManager(BlockPool(2), block_size=4), enabled=False)


@dataclass(frozen=True)
class Plan:
    """Requests by name with the contents of their inputs, and how many rows each content has.

    `max_attempts` bounds how often an input is offered anew; `faults` are the actions that may happen beside those of
    a quiet life: "abort", "expire", "preempt", "duplicate", "withdraw".
    """

    requests: Mapping[str, Sequence[str]]
    rows: Mapping[str, int]
    budget_rows: int
    max_attempts: int = 2
    faults: frozenset[str] = frozenset({"abort", "expire", "preempt", "duplicate"})
    cross_attention: bool = False


@dataclass
class Receiver:
    """One state of the world. `offerable` is the newest attempt of each input that its owner has asked for;
    `granted` are the offers for which room was promised once: their tensors may come."""

    plan: Plan
    state: EngineState
    intake: InputReceiver
    requests: dict[str, Request] = field(default_factory=dict)
    offerable: dict[tuple[str, int], int] = field(default_factory=dict)
    granted: set[tuple[str, int, int]] = field(default_factory=set)
    sent: set[tuple[str, int, int]] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, plan: Plan) -> Receiver:
        cache = EncoderCacheManager(plan.budget_rows * ROW_BYTES)
        offer_check = CROSS_OFFER_CHECK if plan.cross_attention else OFFER_CHECK
        state = EngineState()
        return cls(plan, state, InputReceiver(state, cache, offer_check, CACHE_LOOKUP, lease_s=FAR_S), offerable={})

    # --- what can happen

    def actions(self) -> list[Action]:
        plan, found = self.plan, list[Action]()
        for name, contents in plan.requests.items():
            request = self.requests.get(name)
            if request is None and name not in self.ended:
                found.append(("arrive", name))
            if "abort" in plan.faults and name not in self.ended:
                found.append(("abort", name))
            for number in range(len(contents)):
                newest = self.offerable.get((name, number), 0)
                first = 0 if "duplicate" in plan.faults else newest
                for attempt in range(first, newest + 1):
                    if "duplicate" in plan.faults or (name, number, attempt) not in self.sent:
                        found.append(("offer", name, str(number), str(attempt)))
                    if "withdraw" in plan.faults:
                        found.append(("withdraw", name, str(number), str(attempt)))
            if request is not None and request.num_remaining(request.sequences[0]) > 0:
                found.append(("prefill", name))
            if request is not None and "preempt" in plan.faults and request.sequences[0].num_computed_tokens:
                found.append(("preempt", name))
            for item in request.inputs if request is not None else ():
                if "expire" in plan.faults and item.state in (InputState.OFFERED, InputState.GRANTED):
                    found.append(("expire", name, str(item.slot.input_id)))
        found += [("deliver", name, str(number), str(attempt)) for name, number, attempt in sorted(self.granted)]
        if not any(action[0] == "prefill" for action in found) and self.intake.is_stuck:
            found.append(("idle",))
        return found

    def apply(self, action: Action) -> None:
        kind, *rest = action
        getattr(self, f"_{kind}")(*rest)
        self.intake.grant()
        self._take_events()
        self.check()

    def _arrive(self, name: str) -> None:
        contents, cross = self.plan.requests[name], self.plan.cross_attention
        prompt = [1] if cross else [1, *(PAD for _ in contents), 2]
        slots = [InputSlot(i, "image", content, None if cross else i + 1) for i, content in enumerate(contents)]
        arrival = list(self.plan.requests).index(name)
        inputs = [RequestInput(slot) for slot in slots]
        request = Request(
            name, prompt, inputs, sampling=SAMPLING, arrival=arrival, cross_attention=cross, is_encoder_decoder=cross
        )
        self.requests[name] = request
        self.intake.add_request(request)

    def _abort(self, name: str) -> None:
        self.ended.add(name)
        request = self.requests.pop(name, None)
        if request is None:
            self.intake.state.emit(*self.intake.early.forget(name, None))
        else:
            self.intake.end_request(request)

    def _offer(self, name: str, number: str, attempt: str) -> None:
        content = self.plan.requests[name][int(number)]
        self.sent.add((name, int(number), int(attempt)))
        self.intake.offer(self._offer_of((name, int(number), int(attempt)), content))
        self.intake.grant()
        self._check_answered(name, int(number), int(attempt))

    def _withdraw(self, name: str, number: str, attempt: str) -> None:
        """May come before its offer, or long after: only what is kept for exactly this attempt is free."""
        before = self._held()
        self.intake.withdraw(name, int(number), int(attempt))
        assert self._held() == before - {(name, int(number), int(attempt))}

    def _held(self) -> set[tuple[str, int, int]]:
        """Attempts that room is kept or wanted for."""
        early = {(*key, offer.attempt) for key, (offer, _) in self.intake.early._offers.items()}
        inputs = [(name, item) for name, request in self.requests.items() for item in request.inputs]
        waits = (InputState.OFFERED, InputState.GRANTED)
        return early | {(name, item.slot.input_id, item.attempt) for name, item in inputs if item.state in waits}

    def _check_answered(self, name: str, number: int, attempt: int) -> None:
        """Whoever has just offered something is told, or stands in a line."""
        request, early = self.requests.get(name), self.intake.early._offers.get((name, number))
        waits = early is not None and early[0].attempt == attempt
        if request is not None:
            item = request.inputs[number]
            waits = item.state is InputState.OFFERED and item.attempt == attempt
        key = name, number, attempt
        answers = (e for e in self.state.outbox if isinstance(e, Grant))
        told = any((e.request_id, e.input_id, e.attempt) == key for e in answers)
        assert told or waits, f"the offer of {key} is neither answered nor kept"

    def _offer_of(self, key: tuple[str, int, int], content: str) -> Offer:
        rows = self.plan.rows[content]
        layout = InputLayout(rows, [] if self.plan.cross_attention else [(PAD, rows)])
        return Offer(*key, content, "image", [rows, HIDDEN], "float32", rows * ROW_BYTES, layout, "e0", FAR_S)

    def _deliver(self, name: str, number: str, attempt: str) -> None:
        if "duplicate" not in self.plan.faults:
            self.granted.discard((name, int(number), int(attempt)))
        self.intake.deliver(name, int(number), int(attempt), self._tensor(self.plan.requests[name][int(number)]))

    def _tensor(self, content: str) -> torch.Tensor:
        rows = self.plan.rows[content]
        key = content, rows
        if key not in _tensors:
            _tensors[key] = torch.full((rows, HIDDEN), float(len(_tensors)))
        return _tensors[key]

    def _prefill(self, name: str) -> None:
        """As the engine does after a forward pass: what it needs is read, what it has passed is given up."""
        request = self.requests[name]
        [sequence] = request.sequences
        for item in request.inputs:
            if item.state is InputState.READY:
                self._check_content(item)
        sequence.num_computed_tokens = request.num_computable_tokens(sequence)
        self.intake.consume(request)
        self.intake.grant()
        self.intake.revoke(only_blocked=True)

    def _idle(self) -> None:
        """As the engine does where nothing can run. There may be nothing to take back: the holder is older than whoever
        waits, and waits itself for something that has not been offered yet."""
        self.intake.revoke(only_blocked=False)

    def _preempt(self, name: str) -> None:
        request = self.requests[name]
        request.sequences[0].num_computed_tokens = 0
        for item in request.inputs:
            if item.state is InputState.CONSUMED:
                item.state = InputState.DORMANT
        self.intake.update([request])

    def _expire(self, name: str, number: str) -> None:
        self.requests[name].inputs[int(number)].deadline_s = 0.0
        self.intake.expire(now_s=1.0)

    # --- what has happened

    def _take_events(self) -> None:
        for event in self.state.pop_output():
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Grant) and event.status == "granted":
            self.granted.add((event.request_id, event.input_id, event.attempt))
        elif isinstance(event, InputNeeded):
            key = event.request_id, event.input_id
            self.offerable[key] = min(self.offerable.get(key, 0) + 1, self.plan.max_attempts)
        elif isinstance(event, Grant | Receipt) and event.status in ("stored", "cached"):
            request = self.requests[event.request_id]
            item = request.inputs[event.input_id]
            assert item.usable or item.state is InputState.DORMANT, f"{event} and {item.state}"

    # --- what has to hold

    def check(self) -> None:
        cache = self.intake.cache
        cache.check_integrity()
        expected: dict[str, set[tuple[str, int]]] = {}
        for name, request in self.requests.items():
            for item in request.inputs:
                self._check_item(name, item, expected)
        entries = cache._entries.items()
        assert {name: entry.references for name, entry in entries if entry.references} == expected

    def _check_item(self, name: str, item: RequestInput, expected: dict[str, set[tuple[str, int]]]) -> None:
        number, content = item.slot.input_id, item.slot.content_hash
        if item.state in (InputState.GRANTED, InputState.READY):
            expected.setdefault(content, set()).add((name, number))
        if item.state is InputState.GRANTED:
            assert (name, number, item.attempt) in self.granted, "granted, and nobody has been told"
        if item.state is InputState.READY:
            self._check_content(item)
        if item.state is InputState.CONSUMED and not self.plan.cross_attention:
            computed = self.requests[name].sequences[0].num_computed_tokens
            passed = item.end is not None and item.end <= computed
            assert passed, "given up before the prefill has passed it"
        assert ((name, number) in self.intake.granted) == (item.state is InputState.GRANTED)
        waits = [pair for pair in self.intake.pending if pair[1] is item]
        assert len(waits) == (item.state is InputState.OFFERED)

    def _check_content(self, item: RequestInput) -> None:
        held = self.intake.cache.get(item.slot.content_hash)
        assert torch.equal(held, self._tensor(item.slot.content_hash)), "the room holds another input's tensor"

    def run_quietly(self) -> None:
        """From here on nothing is lost and nobody leaves: every request must come to its end.

        An owner whose input is missing has it offered again; whoever is granted delivers.
        """
        for name in self.plan.requests:
            if name not in self.ended and name not in self.requests:
                self.apply(("arrive", name))
        for _ in range(200):
            if all(item.state is InputState.CONSUMED for item in self._items()):
                break
            self._quiet_round()
        else:
            raise AssertionError(f"the burst does not drain: {self.fingerprint()}")
        for request in list(self.requests.values()):
            self.apply(("abort", request.request_id))
        for key in list(self.intake.early._offers):
            self.apply(("abort", key[0]))
        assert self.intake.is_empty(), "every request has ended, but something is held"

    def _quiet_round(self) -> None:
        for name, request in self.requests.items():
            for item in request.inputs:
                number, attempt = item.slot.input_id, item.attempt
                if item.state is InputState.MISSING:
                    self.apply(("offer", name, str(number), str(attempt + 1)))
                elif item.state is InputState.GRANTED:
                    self.apply(("deliver", name, str(number), str(attempt)))
        ready = [name for name, request in self.requests.items() if request.num_remaining(request.sequences[0]) > 0]
        for name in ready:
            self.apply(("prefill", name))
        if not ready and self.intake.is_stuck:
            self.apply(("idle",))

    def _items(self) -> list[RequestInput]:
        return [item for request in self.requests.values() for item in request.inputs]

    def fingerprint(self) -> Hashable:
        intake, cache = self.intake, self.intake.cache
        return (
            tuple(self._progress_of(one) for _, one in sorted(self.requests.items())),
            tuple(sorted(self.offerable.items())),
            tuple(sorted(self.granted)),
            tuple(sorted(self.ended)),
            () if "duplicate" in self.plan.faults else tuple(sorted(self.sent)),
            tuple(sorted((key, offer.attempt) for key, (offer, _) in intake.early._offers.items())),
            tuple((request.request_id, item.slot.input_id) for request, item in intake._dormant),
            tuple(sorted((name, entry.tensor is None) for name, entry in cache._entries.items())),
            tuple(cache._unreferenced),
        )

    def _progress_of(self, request: Request) -> Hashable:
        inputs = tuple((item.state.name, item.attempt) for item in request.inputs)
        return request.request_id, request.sequences[0].num_computed_tokens, len(request.prompt), inputs

    def copy(self) -> Receiver:
        constants = (self.plan, SAMPLING, OFFER_CHECK, CROSS_OFFER_CHECK, CACHE_LOOKUP)
        return copy_sharing(self, (*constants, *_tensors.values()))
