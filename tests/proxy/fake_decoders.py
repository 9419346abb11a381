"""Workers that read prompts: one prefills, one decodes, one does both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from common.errors import ErrorInfo
from common.messages import (
    KV_INPUT_ID,
    Abort,
    Encode,
    Encoded,
    Failed,
    Generate,
    InputNeeded,
    Inquiry,
    Prefilled,
    Role,
    Span,
    TokenLogprob,
    Tokens,
    ToWorker,
)
from tests.proxy.fake_workers import SILENT, FakeWorker

if TYPE_CHECKING:
    from tests.proxy.fake_cluster import FakeCluster


class FakeReader(FakeWorker):
    """Takes requests and their inputs; a newer attempt replaces an older one. Encodes for itself if it says so.

    `ask_again` inputs are asked for once more. So many requests as `lose` says are lost on their way.
    """

    def __init__(self, cluster: FakeCluster, role: Role, instance_id: str) -> None:
        super().__init__(cluster, role, instance_id)
        self.ask_again: list[int] = []
        self.lose = 0
        self._inputs: dict[str, set[int]] = {}
        self._attempts: dict[str, int] = {}
        self._request_attempts: dict[str, int] = {}
        self._arrived = asyncio.Condition()
        self._running: dict[str, asyncio.Task[None]] = {}

    def put_input(self, request_id: str, input_id: int, attempt: int = 0) -> None:
        self._attempts[request_id] = attempt
        self._inputs.setdefault(request_id, set()).add(input_id)
        self.spawn(self._notify())

    async def die(self, *, leave_entry: bool = False) -> None:
        await super().die(leave_entry=leave_entry)
        self._running.clear()

    async def run(self, proxy: bytes, message: Generate) -> None:
        raise AssertionError

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Abort):
            self._cancel(message.request_id)
        elif isinstance(message, Encode):
            assert message.destination == self.id
            self.put_input(message.request_id, message.input_id)
            await self.reply(proxy, Encoded(message.request_id, message.input_id, message.attempt))
        elif isinstance(message, Inquiry):
            if message.request_id not in self._running:
                lost = ErrorInfo("unavailable", f"{self.id} has lost the request")
                await self.reply(proxy, Failed(message.request_id, lost, message.attempt))
        elif isinstance(message, Generate) and self.lose:
            self.lose -= 1
        elif isinstance(message, Generate):
            self._cancel(message.request_id)
            self._attempts[message.request_id] = message.attempt
            self._request_attempts[message.request_id] = message.attempt
            task = asyncio.current_task()
            assert task is not None
            self._running[message.request_id] = task
            await self.run(proxy, message)
            self._running.pop(message.request_id, None)

    async def take_inputs(self, proxy: bytes, message: Generate) -> None:
        request_id = message.request_id
        await self.wait_for(request_id, {slot.input_id for slot in message.inputs})
        for input_id in self.ask_again:
            await self.ask_for_input(proxy, request_id, input_id)
            await self.wait_for(request_id, {input_id})

    async def ask_for_input(self, proxy: bytes, request_id: str, input_id: int) -> None:
        self._inputs.setdefault(request_id, set()).discard(input_id)
        attempts = self._attempts.get(request_id, 0), self._request_attempts.get(request_id, 0)
        await self.reply(proxy, InputNeeded(request_id, input_id, *attempts))

    async def wait_for(self, request_id: str, wanted: set[int]) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: wanted <= self._inputs.get(request_id, set()))

    def prompt_logprobs(self, message: Generate) -> list[TokenLogprob | None]:
        count = message.sampling.prompt_logprobs
        if count is None:
            return []
        ids = message.prompt_token_ids
        return [None, *(logprob(place, token, count) for place, token in enumerate(ids[1:]))]

    def _cancel(self, request_id: str) -> None:
        task = self._running.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()


class FakePrefill(FakeReader):
    """Hands prompts over by a method call once all inputs are there. `script` returns None (done), an error, or SILENT:
    then nothing comes.

    With `hold`, the prompt is delivered, but nothing is said of it until `release`.
    """

    def __init__(self, cluster: FakeCluster, role: Role, instance_id: str) -> None:
        super().__init__(cluster, role, instance_id)
        self.script: Callable[[Generate], ErrorInfo | str | None] = lambda message: None
        self.hold = False
        self.release = asyncio.Event()

    async def run(self, proxy: bytes, message: Generate) -> None:
        await self.take_inputs(proxy, message)
        outcome = self.script(message)
        if outcome == SILENT:
            await asyncio.Event().wait()
        error = outcome if isinstance(outcome, ErrorInfo) else None
        if error is None:
            decoder = self.cluster.reader(message.prefill_for)
            assert decoder is not None
            decoder.put_input(message.request_id, KV_INPUT_ID, message.attempt)
            if self.hold:
                await self.release.wait()
        now = time.time()
        spans = [Span("prefill", self.id, now - 0.01, now)]
        logprobs = [] if error else self.prompt_logprobs(message)
        await self.reply(proxy, Prefilled(message.request_id, message.attempt, error, spans, logprobs))


class FakeDecoder(FakeReader):
    """Answers with `answer(message)`, one token per message and sequence in turn, once all inputs are there.

    The answer is text or token ids, the same for every sequence, or a list of answers, one each; beams come as a whole.
    A resumed request goes on behind the tokens that it has. Every token's log-probability is -(position + 1) / 10.
    `pause_after` messages it waits for `resume`; `failure` is sent instead of an answer; a prompt that comes by handoff
    is asked for `ask_prompt_again` times more.
    """

    def __init__(self, cluster: FakeCluster, role: Role, instance_id: str) -> None:
        super().__init__(cluster, role, instance_id)
        self.answer: Callable[[Generate], str | list[int] | list[str]] = lambda message: "a red sign"
        self.failure: ErrorInfo | None = None
        self.pause_after: int | None = None
        self.resume = asyncio.Event()
        self.ask_prompt_again = 0
        self.num_cached_tokens = 0

    async def run(self, proxy: bytes, message: Generate) -> None:
        if self.failure is not None:
            await self.reply(proxy, Failed(message.request_id, self.failure, message.attempt))
            return
        if message.prefilled:
            await self._take_prompt(proxy, message)
        else:
            await self.take_inputs(proxy, message)
        for number, tokens in enumerate(self.messages(message)):
            if number == self.pause_after:
                await self.resume.wait()
            await self.reply(proxy, msgspec.structs.replace(tokens, attempt=message.attempt))
            await self.sent(tokens)

    async def sent(self, tokens: Tokens) -> None:
        """Do what comes between two messages."""
        await asyncio.sleep(0)

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
        first = {"prompt_logprobs": [] if message.prefilled else self.prompt_logprobs(message)}
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
        logprobs = [] if count is None else [logprob(place, token, count) for place, token in enumerate(ids)]
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

    async def ask_for_prompt(self, proxy: bytes, request_id: str) -> None:
        await self.ask_for_input(proxy, request_id, KV_INPUT_ID)

    async def _take_prompt(self, proxy: bytes, message: Generate) -> None:
        await self.wait_for(message.request_id, {KV_INPUT_ID})
        for _ in range(self.ask_prompt_again):
            await self.ask_for_prompt(proxy, message.request_id)
            await self.wait_for(message.request_id, {KV_INPUT_ID})


def logprob(place: int, token: int, count: int) -> TokenLogprob:
    top = [(token + number, -(place + 1) / 10 - number) for number in range(count)]
    return TokenLogprob(token, -(place + 1) / 10, 1, top)
