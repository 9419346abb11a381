"""Workers without engines: real sockets, real messages, a real registry, answers from a script."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import zmq.asyncio
from redis.asyncio import Redis

from broker.registry import Registry
from broker.rpc import WorkerServer
from common.errors import ErrorInfo
from common.messages import (
    Abort,
    Encode,
    Encoded,
    Failed,
    FromWorker,
    Generate,
    Heartbeat,
    InputNeeded,
    InstanceRecord,
    Role,
    Span,
    TokenLogprob,
    Tokens,
    ToWorker,
)
from common.model_info import ModelInfo
from common.text import TextProcessor

SILENT = "silent"


@dataclass
class FakeCluster:
    """Encoders and decoders of one model; an encoded input reaches its decoder by a method call."""

    redis: Redis
    info: ModelInfo
    text: TextProcessor
    name: str
    context: zmq.asyncio.Context
    encoders: list[FakeEncoder] = field(default_factory=list)
    decoders: list[FakeDecoder] = field(default_factory=list)

    async def add_encoder(self) -> FakeEncoder:
        encoder = FakeEncoder(self, "encoder", f"e{len(self.encoders)}")
        self.encoders.append(encoder)
        await encoder.start()
        return encoder

    async def add_decoder(self) -> FakeDecoder:
        decoder = FakeDecoder(self, "prefill_decode", f"pd{len(self.decoders)}")
        self.decoders.append(decoder)
        await decoder.start()
        return decoder

    def decoder(self, instance_id: str) -> FakeDecoder | None:
        return next((worker for worker in self.decoders if worker.id == instance_id and worker.alive), None)

    async def stop(self) -> None:
        for worker in (*self.encoders, *self.decoders):
            await worker.die()


class FakeWorker:
    """Takes messages, remembers them in `received`, and handles each by `handle`."""

    def __init__(self, cluster: FakeCluster, role: Role, instance_id: str) -> None:
        self.cluster, self.role, self.id = cluster, role, instance_id
        self.received: list[ToWorker] = []
        self.proxies: list[bytes] = []
        self.errors: list[BaseException | None] = []
        self.alive = False
        self.server = WorkerServer(cluster.context)
        self.registry = Registry(cluster.redis, cluster.name)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, **changes: str) -> None:
        values = {"fingerprint": self.cluster.info.fingerprint, "dtype": "float32", **changes}
        record = InstanceRecord(
            instance_id=self.id,
            role=self.role,
            epoch=time.time_ns(),
            model=self.cluster.info.name,
            http_address="127.0.0.1:1",
            requests_address=self.server.address,
            **values,
        )
        self.alive = True
        await self.registry.register(record)
        self.spawn(self._beat())
        self.spawn(self._receive())

    async def die(self, *, leave_entry: bool = False) -> None:
        """As a killed process: the socket closes at once. Its registry entry goes, too, or is left to expire."""
        if not self.alive:
            return
        self.alive = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.server.close()
        if not leave_entry:
            await self.registry.unregister()

    def of(self, kind: type, request_id: str | None = None) -> list:
        """The messages of a kind received so far, of one request or of all."""
        return [m for m in self.received if isinstance(m, kind) and request_id in (None, m.request_id)]

    def spawn(self, coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(task.exception())
            traceback.print_exception(task.exception())

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        raise AssertionError

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.registry.heartbeat()

    async def _receive(self) -> None:
        while True:
            proxy, message = await self.server.receive()
            if not isinstance(message, Heartbeat):
                self.received.append(message)
                self.proxies.append(proxy)
                self.spawn(self.handle(proxy, message))


class FakeEncoder(FakeWorker):
    """Encodes by doing nothing. `script` returns None (done), an error, or SILENT."""

    script: Callable[[Encode], ErrorInfo | str | None] = staticmethod(lambda message: None)

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        if not isinstance(message, Encode):
            return
        outcome = self.script(message)
        if outcome == SILENT:
            return
        if outcome is None:
            decoder = self.cluster.decoder(message.destination)
            assert decoder is not None
            decoder.put_input(message.request_id, message.input_id)
        now = time.time()
        spans = [Span("encode", self.id, now - 0.01, now)]
        error = outcome if isinstance(outcome, ErrorInfo) else None
        self.server.send(
            proxy, Encoded(message.request_id, message.input_id, message.attempt, error=error, spans=spans)
        )


class FakeDecoder(FakeWorker):
    """Answers with `answer(message)`, one token per message and sequence in turn, once all inputs are there.

    The answer is text or token ids, the same for every sequence, or a list of answers, one each; beams come as a whole.
    A resumed request goes on behind the tokens that it has. Every token's log-probability is -(position + 1) / 10.
    `pause_after` messages it waits for `resume`; `failure` is sent instead of an answer; `ask_again` inputs are asked
    for once more before the answer.
    """

    def __init__(self, cluster: FakeCluster, role: Role, instance_id: str) -> None:
        super().__init__(cluster, role, instance_id)
        self.answer: Callable[[Generate], str | list[int] | list[str]] = lambda message: "a red sign"
        self.failure: ErrorInfo | None = None
        self.pause_after: int | None = None
        self.resume = asyncio.Event()
        self.ask_again: list[int] = []
        self.num_cached_tokens = 0
        self._inputs: dict[str, set[int]] = {}
        self._arrived = asyncio.Condition()
        self._running: dict[str, asyncio.Task[None]] = {}

    def put_input(self, request_id: str, input_id: int) -> None:
        self._inputs.setdefault(request_id, set()).add(input_id)
        self.spawn(self._notify())

    async def die(self, *, leave_entry: bool = False) -> None:
        await super().die(leave_entry=leave_entry)
        self._running.clear()

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Abort):
            task = self._running.pop(message.request_id, None)
            if task is not None:
                task.cancel()
        elif isinstance(message, Generate):
            task = asyncio.current_task()
            assert task is not None
            self._running[message.request_id] = task
            await self._generate(proxy, message)
            self._running.pop(message.request_id, None)

    async def _generate(self, proxy: bytes, message: Generate) -> None:
        request_id = message.request_id
        if self.failure is not None:
            await self.reply(proxy, Failed(request_id, self.failure))
            return
        await self._wait_for_inputs(message)
        for input_id in self.ask_again:
            self._inputs[request_id].discard(input_id)
            await self.reply(proxy, InputNeeded(request_id, input_id))
            await self._wait_for_inputs(message)
        for number, tokens in enumerate(self.messages(message)):
            if number == self.pause_after:
                await self.resume.wait()
            await self.reply(proxy, tokens)

    def messages(self, message: Generate) -> list[Tokens]:
        """Everything that is sent for a request: the sequences take turns, the last message is marked."""
        have = {part.index: len(part.token_ids) for part in message.resumed}
        indices = list(have) if message.resumed else range(message.sampling.n)
        sequences = {index: self._sequence(message, index) for index in indices}
        turns = [
            turn for index in indices for turn in self._turns(message, index, sequences[index], have.get(index, 0))
        ]
        turns.sort(key=lambda tokens: (tokens.offset, tokens.index))
        now = time.time()
        prompt = len(message.prompt_token_ids) + 10 * len(message.inputs)
        first = {"prompt_logprobs": self._prompt_logprobs(message)}
        last = {"done": True, "spans": [Span("decode", self.id, now, time.time())]}
        return [
            msgspec.structs.replace(
                tokens,
                num_prompt_tokens=prompt,
                num_cached_tokens=self.num_cached_tokens,
                **(first if number == 0 else {}),
                **(last if number == len(turns) - 1 else {}),
            )
            for number, tokens in enumerate(turns)
        ]

    def _sequence(self, message: Generate, index: int) -> tuple[list[int], str]:
        """A sequence's tokens, and why it ends."""
        answer = self.answer(message)
        if isinstance(answer, list) and answer and isinstance(answer[0], str):
            answer = answer[index]
        ids = self.cluster.text.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
        limit = message.sampling.max_tokens
        return ([*ids, self.cluster.info.eos_token_ids[0]], "stop") if len(ids) < limit else (ids[:limit], "length")

    def _turns(self, message: Generate, index: int, sequence: tuple[list[int], str], have: int) -> list[Tokens]:
        ids, finish = sequence
        count = message.sampling.logprobs
        logprobs = [] if count is None else [self._logprob(place, token, count) for place, token in enumerate(ids)]
        if message.sampling.uses_beams:
            score = -float(index + 1)
            return [Tokens(message.request_id, 0, ids, finish, index=index, logprobs=logprobs, score=score)]
        return [
            Tokens(
                message.request_id,
                place,
                [ids[place]],
                finish if place == len(ids) - 1 else None,
                index=index,
                logprobs=logprobs[place : place + 1],
            )
            for place in range(have, len(ids))
        ]

    def _prompt_logprobs(self, message: Generate) -> list[TokenLogprob | None]:
        count = message.sampling.prompt_logprobs
        if count is None:
            return []
        ids = message.prompt_token_ids
        return [None, *(self._logprob(place, token, count) for place, token in enumerate(ids[1:]))]

    def _logprob(self, place: int, token: int, count: int) -> TokenLogprob:
        top = [(token + number, -(place + 1) / 10 - number) for number in range(count)]
        return TokenLogprob(token, -(place + 1) / 10, 1, top)

    async def _wait_for_inputs(self, message: Generate) -> None:
        wanted = {slot.input_id for slot in message.inputs}
        async with self._arrived:
            await self._arrived.wait_for(lambda: wanted <= self._inputs.get(message.request_id, set()))

    async def reply(self, proxy: bytes, message: FromWorker) -> None:
        self.server.send(proxy, message)


@asynccontextmanager
async def fake_cluster(redis: Redis, info: ModelInfo, name: str) -> AsyncIterator[FakeCluster]:
    context = zmq.asyncio.Context()
    cluster = FakeCluster(redis, info, TextProcessor(info), name, context)
    try:
        yield cluster
    finally:
        await cluster.stop()
        context.destroy(linger=0)
