"""One job among workers that die, fail, forget and come in any order: its tokens come once each, nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ErrorInfo, TriptychError
from common.messages import (
    KV_INPUT_ID,
    WORKER_ROLES,
    Abort,
    Encode,
    Encoded,
    Failed,
    FinishReason,
    Generate,
    InputNeeded,
    InputSlot,
    Inquiry,
    InstanceRecord,
    Prefilled,
    Resumed,
    Role,
    TokenLogprob,
    Tokens,
    ToWorker,
)
from common.sampling_params import SamplingParams
from proxy.api.merge import merge_streams
from proxy.dispatch import job_runner, progress
from proxy.dispatch.context import DispatchContext
from proxy.dispatch.job_runner import JobRunner
from proxy.dispatch.jobs import Job, MediaItem
from proxy.dispatch.placement import Placer
from proxy.dispatch.worker import Load, Worker
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics
from tests.eventually import eventually

NUM_TOKENS = 3
BUSY = ErrorInfo("unavailable", "not now")


@dataclass
class Sim:
    """A worker: what it has been told, and what it may do next."""

    world: World
    worker: Worker
    job: Generate | None = None
    encodes: dict[int, Encode] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    known: dict[int, int] = field(default_factory=dict)  # the last attempt of each input that has come, ever
    sent: int = 0
    offered: int = 0  # the last attempt to compute the prompt for it

    def send(self, message: ToWorker) -> None:
        if isinstance(message, Generate):
            resumed = len(message.resumed[0].token_ids) if message.resumed else 0
            self.job, self.sent, self.inputs = message, resumed, set()
            self.world.begins[message.attempt] = resumed
            decoder = self.world.find(message.prefill_for)
            if decoder is not None:
                decoder.offered = message.attempt
        elif isinstance(message, Encode):
            self.encodes[message.input_id] = message
        elif isinstance(message, Abort):
            self.job, self.encodes = None, {}
        elif isinstance(message, Inquiry) and (self.job is None or self.job.attempt != message.attempt):
            self.say(Failed("r", BUSY, message.attempt))

    def say(self, message: Any) -> None:
        self.world.runner.post(self.worker, message)

    def actions(self, *, faults: bool) -> list[Any]:
        """What it may do now, each a function without arguments."""
        found: list[Any] = []
        for encode in self.encodes.values():
            found.append(lambda encode=encode: self.encoded(encode, None))
            if faults:
                found.append(lambda encode=encode: self.encoded(encode, BUSY))
        job = self.job
        if job is None:
            return found
        wanted = {KV_INPUT_ID} if job.prefilled else {slot.input_id for slot in job.inputs}
        if wanted <= self.inputs:
            found.append(self.prefilled if job.prefill_for else self.token)
            if faults and not job.prefill_for:
                found.append(lambda: self.token(lost=True))
        if faults:
            found.append(self.lose)
        if faults and job.prefill_for:
            found.append(lambda: self.prefilled(BUSY))
        elif faults:
            found += [lambda: self.need(wanted), self.fail]
        return found

    def encoded(self, encode: Encode, error: ErrorInfo | None) -> None:
        del self.encodes[encode.input_id]
        reader = self.world.find(encode.destination)
        wanted = reader is not None and reader.job is not None and reader.job.attempt == encode.request_attempt
        if error is None and reader is not None and wanted:
            reader.inputs.add(encode.input_id)
            reader.known[encode.input_id] = encode.attempt
        elif error is None:
            error = ErrorInfo("unavailable", f"{encode.destination} is gone")
        self.say(Encoded("r", encode.input_id, encode.attempt, error))

    def prefilled(self, error: ErrorInfo | None = None) -> None:
        assert self.job is not None
        decoder = self.world.find(self.job.prefill_for)
        if error is None and decoder is not None and decoder.job is not None:
            assert decoder.job.prefilled
            decoder.inputs.add(KV_INPUT_ID)
        known: list[TokenLogprob | None] = [None] if self.job.sampling.prompt_logprobs is not None else []
        self.say(Prefilled("r", self.job.attempt, error, prompt_logprobs=known if error is None else []))
        self.job = None

    def token(self, *, lost: bool = False) -> None:
        assert self.job is not None
        attempt = self.job.attempt
        ends = self.sent == NUM_TOKENS - 1
        known: list[TokenLogprob | None] = [None] if self.sent == 0 and not self.job.prefilled else []
        reason: FinishReason | None = "length" if ends else None
        token = NUM_TOKENS * attempt + self.sent  # drawn anew in every attempt
        if not lost:
            self.say(Tokens("r", self.sent, [token], reason, done=ends, prompt_logprobs=known, attempt=attempt))
        self.sent += 1
        if ends:
            self.job = None

    def need(self, wanted: set[int]) -> None:
        assert self.job is not None
        for input_id in wanted:
            self.inputs.discard(input_id)
            attempt = self.offered if input_id == KV_INPUT_ID else self.known.get(input_id, 0)
            self.say(InputNeeded("r", input_id, attempt, self.job.attempt))

    def lose(self) -> None:
        """As if it had never come."""
        self.job = None

    def fail(self) -> None:
        assert self.job is not None
        self.say(Failed("r", BUSY, self.job.attempt))
        self.job = None


class World:
    """Stands in for the pool: workers are here or not, and whoever is missing is waited for."""

    def __init__(self, roles: list[Role], num_inputs: int, prompt_logprobs: bool) -> None:
        self.sims: list[Sim] = []
        self._names = itertools.count()
        items = [MediaItem("image", b"x", f"hash{index}", "picture") for index in range(num_inputs)]
        slots = [InputSlot(index, "image", item.content_hash, index) for index, item in enumerate(items)]
        sampling = SamplingParams(max_tokens=NUM_TOKENS, prompt_logprobs=0 if prompt_logprobs else None)
        self.metrics = ProxyMetrics()
        for role in roles:
            self._add(role)
        cluster = DispatchContext(cast(WorkerPool, self), Placer(self.metrics), self.metrics, handoff_timeout_s=60.0)
        self.runner = JobRunner(Job("r", [1, 2, 3], sampling, slots, items), cluster, 2**40, {})
        self.got: list[Tokens] = []
        self.begins: dict[int, int] = {}  # the first token of each attempt to generate
        self.task = asyncio.create_task(self._read())

    def workers(self, *roles: Role, matching: Worker | None = None) -> list[Worker]:
        return [sim.worker for sim in self.sims if sim.worker.record.role in roles]

    has_looked = True

    own = InstanceRecord("proxy", "proxy", 1, "m", "f", "", "", "")

    num_proxies = 1

    away_s = 1.0
    """For how long those have been away who are not here."""

    def absent_s(self, *roles: Role, matching: Worker | None = None) -> float:
        return 0.0 if self.workers(*roles) else self.away_s

    def find(self, instance_id: str) -> Sim | None:
        return next((sim for sim in self.sims if sim.worker.instance_id == instance_id), None)

    def join(self, role: Role) -> None:
        self.runner.post(self._add(role).worker, "joined")

    def kill(self, sim: Sim) -> None:
        self.sims.remove(sim)
        sim.worker.gone = True
        self.runner.post(sim.worker, "gone")

    def _add(self, role: Role) -> Sim:
        name = f"{role}{next(self._names)}"
        record = InstanceRecord(name, role, 1, "m", "f", "float32", "", "", encodes=role == "encode_prefill_decode")
        worker = Worker(record, cast(Any, None), Load())
        sim = Sim(self, worker)
        worker.client = cast(Any, sim)
        self.sims.append(sim)
        return sim

    async def _read(self) -> None:
        async for tokens in self.runner.tokens():
            self.got.append(tokens)


async def _settle(world: World) -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def _play(data: st.DataObject, world: World) -> None:
    for _ in range(data.draw(st.integers(0, 25))):
        if world.task.done():
            return
        actions = [action for sim in world.sims for action in sim.actions(faults=True)]
        actions += [lambda sim=sim: world.kill(sim) for sim in world.sims]
        actions += [lambda role=role: world.join(role) for role in WORKER_ROLES]
        data.draw(st.sampled_from(actions))()
        if data.draw(st.booleans()):
            await _settle(world)


async def _heal(world: World) -> None:
    """From here on everything works: the job must come to its end, once it has been asked for where it was lost."""
    runner = world.runner
    if runner._decoder is not None:
        runner._deadlines.set("inquiry", 0.0, runner._inquire)
    for role in WORKER_ROLES:
        world.join(role)
    for _ in range(200):
        await _settle(world)
        if world.task.done():
            return
        actions = [action for sim in world.sims for action in sim.actions(faults=False)]
        if actions:
            actions[0]()
        else:
            await asyncio.sleep(0.001)  # a pause before another attempt
    raise AssertionError("the job did not end")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (progress, job_runner):
        monkeypatch.setattr(module, "BACKOFF_S", 0.0)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.lists(st.sampled_from(WORKER_ROLES), max_size=5), st.integers(0, 2), st.booleans())
def test_tokens_come_once_and_nothing_is_left(
    data: st.DataObject, roles: list[Role], num_inputs: int, prompt_logprobs: bool
) -> None:
    async def run() -> None:
        world = World([*roles, "encoder", "prefill", "decode"], num_inputs, prompt_logprobs)
        await _settle(world)
        await _play(data, world)
        await _heal(world)
        error = world.task.exception()
        drawn = [divmod(token, NUM_TOKENS) for message in world.got for token in message.token_ids]
        for place, (attempt, _) in enumerate(drawn):
            assert {other for other, _ in drawn[world.begins[attempt] : place]} <= {attempt}, (
                "continues what is its own"
            )
        tokens = [place for _, place in drawn]
        if error is None:
            assert tokens == list(range(NUM_TOKENS))
            assert Counter(bool(message.prompt_logprobs) for message in world.got)[True] <= 1 or not prompt_logprobs
            assert not prompt_logprobs or world.got[0].prompt_logprobs
        else:
            assert isinstance(error, TriptychError), error
            assert error.info.retryable, error
            assert re.search(r"decoders were lost with this request|in \d+ attempts", error.info.message), error
            assert tokens == list(range(len(tokens)))
        for sim in world.sims:
            assert sim.worker.load == Load(), sim.worker.instance_id
            assert sim.job is None, f"{sim.worker.instance_id} is still at it"

    asyncio.run(run())


async def test_a_worker_that_never_ceases_to_send_does_not_outlive_the_deadline() -> None:
    world = World(["prefill_decode"], num_inputs=0, prompt_logprobs=False)
    await _settle(world)
    world.sims[0].say(Tokens("r", 0, [1], attempt=1))
    for _ in range(3):
        world.sims[0].say(Failed("r", BUSY, attempt=-1))
    world.runner._deadline_s = time.monotonic()
    await _settle(world)
    error = world.task.exception()
    assert isinstance(error, TriptychError)
    assert error.info.code == "timeout"
    assert len(world.got) == 1, "it was waited for"
    assert world.runner._events


async def test_tokens_that_wait_are_read_as_one_message_per_sequence() -> None:
    world = World(["prefill_decode"], num_inputs=0, prompt_logprobs=False)
    world.runner._progress = progress.Progress(SamplingParams(max_tokens=8, n=2))
    await _settle(world)
    one, two = TokenLogprob(1, -0.5, 1), TokenLogprob(2, -0.25, 1)
    for message in (
        Tokens("r", 0, [1], attempt=1, logprobs=[one], prompt_logprobs=[None]),
        Tokens("r", 0, [7], attempt=1, index=1),
        Tokens("r", 0, [1], attempt=1, logprobs=[one]),  # told twice
        Tokens("r", 1, [2], "stop", attempt=1, logprobs=[two], num_cached_tokens=5),
        Tokens("r", 1, [8], "length", attempt=1, index=1, done=True),
    ):
        world.sims[0].say(message)
    await world.task
    assert world.got == [
        Tokens("r", 0, [1, 2], "stop", attempt=1, logprobs=[one, two], prompt_logprobs=[None], num_cached_tokens=5),
        Tokens("r", 0, [7, 8], "length", attempt=1, index=1, done=True),
    ]


async def test_a_job_of_many_sequences_that_is_read_lags_behind_without_being_ended() -> None:
    """A proxy that was stopped for a while finds more than MAX_UNREAD messages, and its reader takes some at a time."""
    num_sequences, length, burst = 128, 150, 4096
    world = World(["prefill_decode"], num_inputs=0, prompt_logprobs=False)
    world.runner._progress = progress.Progress(SamplingParams(max_tokens=length, n=num_sequences))
    world.task.cancel()
    counts: Counter[int] = Counter()

    async def read() -> None:
        async with aclosing(merge_streams([world.runner.tokens()])) as merged:
            async for _, tokens in merged:
                counts[tokens.index] += len(tokens.token_ids)

    reading = asyncio.create_task(read())
    await _settle(world)
    for number in range(num_sequences * length):
        place, index = divmod(number, num_sequences)
        done = number == num_sequences * length - 1
        reason: FinishReason | None = "length" if place == length - 1 else None
        world.sims[0].say(Tokens("r", place, [1], reason, index=index, done=done, attempt=world.runner._attempt))
        if number % burst == burst - 1:
            await asyncio.sleep(0)
    await reading
    assert counts == dict.fromkeys(range(num_sequences), length)


async def test_tokens_that_came_before_an_error_are_told_before_it() -> None:
    world = World(["prefill_decode"], num_inputs=0, prompt_logprobs=False)
    await _settle(world)
    for place in range(2):
        world.sims[0].say(Tokens("r", place, [place], attempt=1))
    world.sims[0].say(Failed("r", ErrorInfo("internal_error", "broken"), 1))
    with pytest.raises(TriptychError, match="broken"):
        await world.task
    assert [tokens.token_ids for tokens in world.got] == [[0, 1]]


async def test_tokens_that_a_broken_connection_lost_are_generated_again() -> None:
    """The connection was made anew before this proxy noticed that it had broken."""
    world = World(["prefill_decode"], num_inputs=0, prompt_logprobs=False)
    await _settle(world)
    world.sims[0].say(Tokens("r", 0, [1], attempt=1))
    world.sims[0].say(Tokens("r", 2, [3], attempt=1))
    world.sims[0].say(Tokens("r", 3, [4], "length", done=True, attempt=1))
    await _settle(world)
    job = world.sims[0].job
    assert job is not None
    assert (job.attempt, job.resumed) == (2, [Resumed(0, [1])])
    world.sims[0].say(Tokens("r", 1, [2, 3], "length", done=True, attempt=2))
    await world.task
    assert [tokens.token_ids for tokens in world.got] == [[1], [2, 3]]


async def test_a_sequence_whose_end_was_lost_goes_on_though_the_others_have_ended() -> None:
    world = World(["prefill_decode"], num_inputs=0, prompt_logprobs=False)
    world.runner._progress = progress.Progress(SamplingParams(max_tokens=3, n=2))
    await _settle(world)
    decoder = world.sims[0]
    decoder.say(Tokens("r", 0, [1], attempt=1))
    decoder.say(Tokens("r", 0, [7], "stop", index=1, done=True, attempt=1))  # the end of sequence 0 was lost before it
    await _settle(world)
    assert decoder.job is not None
    assert (decoder.job.attempt, decoder.job.resumed) == (2, [Resumed(0, [1]), Resumed(1, [])])
    decoder.say(Tokens("r", 1, [2], "stop", attempt=2))
    decoder.say(Tokens("r", 0, [8], "stop", index=1, done=True, attempt=2))
    await world.task
    assert [(tokens.index, tokens.token_ids, tokens.finish_reason) for tokens in world.got] == [
        (0, [1], None),
        (0, [2], "stop"),
        (1, [8], "stop"),
    ]


async def test_lost_tokens_are_generated_again_though_all_wait_for_log_probabilities_of_the_prompt() -> None:
    """They come from the prefill worker, after the tokens."""
    world = World(["prefill", "decode"], num_inputs=0, prompt_logprobs=True)
    await _settle(world)
    prefiller, decoder = world.sims
    decoder.say(Tokens("r", 0, [1], attempt=1))
    decoder.say(Tokens("r", 2, [3], "length", done=True, attempt=1))
    await _settle(world)
    assert world.got == []
    prefiller.prefilled()
    await _settle(world)
    assert decoder.job is not None
    assert (decoder.job.attempt, decoder.job.resumed) == (2, [Resumed(0, [1])])
    decoder.say(Tokens("r", 1, [2, 3], "length", done=True, attempt=2))
    await world.task
    assert [(tokens.token_ids, tokens.prompt_logprobs) for tokens in world.got] == [([1], [None]), ([2, 3], [])]


async def test_a_repeated_message_behind_the_last_does_not_keep_an_answer_from_its_end() -> None:
    """All of them wait for log-probabilities of the prompt, and are read at once."""
    world = World(["prefill", "decode"], num_inputs=0, prompt_logprobs=True)
    await _settle(world)
    prefiller, decoder = world.sims
    first = Tokens("r", 0, [1], attempt=1)
    for message in (first, Tokens("r", 1, [2], "stop", done=True, attempt=1), first):
        decoder.say(message)
    prefiller.prefilled()
    await _settle(world)
    assert world.task.done()
    assert [tokens.token_ids for tokens in world.got] == [[1, 2]]


async def test_an_input_that_is_needed_again_is_not_read_by_tokens_from_before() -> None:
    world = World(["prefill", "decode", "encoder"], num_inputs=1, prompt_logprobs=True)
    await _settle(world)
    prefiller, decoder, encoder = world.sims
    encoder.encoded(encoder.encodes[0], None)
    decoder.say(Tokens("r", 0, [1], attempt=1))
    decoder.say(InputNeeded("r", 0, request_attempt=1))  # it has given up the blocks of the prompt
    await _settle(world)
    prefiller.prefilled()
    await _settle(world)
    assert [tokens.token_ids for tokens in world.got] == [[1]]
    encoder.encoded(encoder.encodes[0], BUSY)
    await eventually(lambda: 0 in encoder.encodes)
    world.task.cancel()


async def test_an_answer_that_had_come_whole_is_told_however_many_decoders_were_lost() -> None:
    world = World(["prefill_decode"] * (job_runner.MAX_MOVES + 1), num_inputs=0, prompt_logprobs=False)
    await _settle(world)
    for sim in [*world.sims]:
        assert sim.job is not None
        if len(world.sims) == 1:
            sim.say(Tokens("r", 0, [1, 2, 3], attempt=sim.job.attempt))
        world.kill(sim)
        await _settle(world)
    await world.task
    assert [(tokens.token_ids, tokens.finish_reason) for tokens in world.got] == [([1, 2, 3], None), ([], "length")]


async def test_an_encoder_that_is_lost_after_its_item_was_read_costs_nothing() -> None:
    """Its answer is lost with it; that tokens come says that it had done its work."""
    world = World(["prefill_decode", "encoder"], num_inputs=1, prompt_logprobs=False)
    await _settle(world)
    world.join("encode_prefill_decode")  # somewhere else the item could still be encoded
    decoder, encoder, _ = world.sims
    decoder.inputs.add(0)
    decoder.token()
    world.kill(encoder)
    await _settle(world)
    assert len(world.got) == 1
    assert decoder.job is not None, "it was not moved"
    for _ in range(NUM_TOKENS - 1):
        decoder.token()
    await world.task
    assert [token for tokens in world.got for token in tokens.token_ids] == [NUM_TOKENS + n for n in range(NUM_TOKENS)]
    assert [message.worker.load for message in world.sims] == [Load(), Load()]


async def test_an_encoder_and_the_worker_it_encoded_for_may_be_lost_at_once() -> None:
    """The encoder's loss is told first, and the worker that might encode for itself is no longer there."""
    world = World(["encode_prefill_decode", "encoder"], num_inputs=1, prompt_logprobs=False)
    await _settle(world)
    decoder, encoder = world.sims
    assert list(encoder.encodes) == [0]
    world.join("encode_prefill_decode")
    world.kill(encoder)
    world.kill(decoder)
    await _settle(world)
    assert not world.task.done()
    other = world.sims[0]
    assert other.job is not None
    assert list(other.encodes) == [0]
    world.task.cancel()


async def test_an_input_that_nobody_can_encode_here_any_more_takes_its_job_where_somebody_can() -> None:
    """However long encoders have been away: another worker encodes for itself."""
    world = World(["prefill_decode", "encoder"], num_inputs=1, prompt_logprobs=False)
    await _settle(world)
    world.join("encode_prefill_decode")
    decoder, encoder, other = world.sims
    encoder.encoded(encoder.encodes[0], None)
    world.kill(encoder)
    world.away_s = 1e9
    decoder.need({0})
    await _settle(world)
    assert not world.task.done()
    assert other.job is not None
    assert list(other.encodes) == [0]
    world.task.cancel()


async def test_what_had_come_when_a_deadline_was_due_may_have_kept_it() -> None:
    """The client was slow, and nothing was read meanwhile. What comes later does not put off the deadline."""
    world = World(["prefill_decode", "encoder"], num_inputs=1, prompt_logprobs=False)
    world.task.cancel()
    runner, (decoder, encoder) = world.runner, world.sims
    runner._place()
    item = runner._encode._items[0]
    encoder.encoded(encoder.encodes[0], None)
    runner._deadlines.set(item, 0.0, partial(runner._encode._on_silent, item))
    await _settle(world)
    for _ in range(2):
        await runner._step()
        assert encoder.encodes == {}, "it is not asked again for what it has done"
    assert not runner._events
    decoder.say(Failed("r", BUSY, attempt=-1))
    runner._deadlines.set(item, 0.0, partial(runner._encode._place, item))
    await _settle(world)
    decoder.say(Failed("r", BUSY, attempt=-1))
    await runner._step()
    assert encoder.encodes == {}
    await runner._step()
    assert list(encoder.encodes) == [0]
    assert len(runner._events) == 1


async def test_what_a_worker_needed_in_an_earlier_attempt_is_not_sent_again() -> None:
    world = World(["prefill_decode", "encoder"], num_inputs=1, prompt_logprobs=False)
    await _settle(world)
    decoder, encoder = world.sims
    encoder.encoded(encoder.encodes[0], None)
    decoder.say(InputNeeded("r", 0, request_attempt=0))
    await _settle(world)
    assert encoder.encodes == {}
    decoder.say(InputNeeded("r", 0, request_attempt=1))
    await _settle(world)
    assert encoder.encodes[0].attempt == 1
    world.task.cancel()


async def test_what_was_lost_again_before_its_encoder_had_answered_is_sent_again() -> None:
    """After a failure two complaints may come: about the attempt that failed, which is no news, and about the next."""
    world = World(["prefill_decode", "encoder"], num_inputs=1, prompt_logprobs=False)
    await _settle(world)
    decoder, encoder = world.sims
    encoder.encoded(encoder.encodes[0], ErrorInfo("timeout", "no room"))
    await _settle(world)
    decoder.say(InputNeeded("r", 0, attempt=0, request_attempt=1))
    await _settle(world)
    assert encoder.encodes[0].attempt == 1
    decoder.say(InputNeeded("r", 0, attempt=1, request_attempt=1))
    await _settle(world)
    assert encoder.encodes[0].attempt == 2
    world.task.cancel()


async def test_a_job_that_comes_back_to_its_decoder_needs_its_prompt_again() -> None:
    """What the decoder had before the move is gone, so a prefill that fails now has to be repeated."""
    world = World(["prefill", "decode"], num_inputs=0, prompt_logprobs=False)
    await _settle(world)
    prefiller, decoder = world.sims
    prefiller.prefilled()
    decoder.token()
    decoder.fail()
    await eventually(lambda: decoder.job is not None and decoder.job.attempt == 2)
    prefiller.prefilled(BUSY)
    await eventually(lambda: prefiller.job is not None and prefiller.job.attempt == 3)
    assert prefiller.job is not None
    assert prefiller.job.prefill_for_attempt == 2
    world.task.cancel()
