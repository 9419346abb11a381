"""Streams of a few tokens about pictures and texts, and what became of each."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import httpx

from tests.churn.cell import MODEL
from tools.soak.asking import Reply, send
from tools.soak.asks import Ask, draw_picture

PATIENCE_S: Final = 120.0
"""An answer that takes longer has no end."""
T, R = TypeVar("T"), TypeVar("R")


def asks(count: int, max_tokens: int) -> list[Ask]:
    """Questions about no, one and two pictures, all different."""
    draw = random.Random(count)
    return [_ask(draw, number, max_tokens) for number in range(count)]


def _ask(draw: random.Random, number: int, max_tokens: int) -> Ask:
    pictures = [{"type": "image_url", "image_url": {"url": draw_picture(draw)}} for _ in range((1, 0, 2)[number % 3])]
    content: list[dict[str, Any]] = [*pictures, {"type": "text", "text": f"What do signs say? {draw.random()}"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "temperature": 0}
    body |= {"model": MODEL, "ignore_eos": True, "return_token_ids": True}
    return Ask(f"question {number} of {max_tokens} tokens", "/v1/chat/completions", body, stream=number % 5 != 0)


@dataclass
class Outcome:
    """What became of the requests: `right` and others by their number, and the first words of each that was not."""

    counts: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def note(self, ask: Ask, reply: Reply | None, expected: Reply) -> None:
        if reply is None:
            end = "without an end"
        elif reply.equals(expected):
            end = "right"
        else:
            end = "wrong" if reply.ending == "whole" or not reply.begins(expected) else reply.ending
        self.counts[end] += 1
        if end != "right":
            self.told.append(f"{end}: {ask.name}: {None if reply is None else (reply.error, dict(reply.tokens))}")


async def expect(url: str, questions: list[Ask]) -> dict[str, Reply]:
    """Ask each once, while nothing happens; return the answers, by name."""
    answers = await _ask_all(url, questions, in_flight=16)
    assert all(reply is not None and reply.ending == "whole" for _, reply in answers), answers
    return {ask.name: reply for ask, reply in answers if reply is not None}


async def ask(url: str, expected: dict[str, Reply], questions: list[Ask], number: int, in_flight: int) -> Outcome:
    """Ask so many times, so many at once; compare each answer with the one that is expected."""
    outcome = Outcome()
    turns = itertools.islice(itertools.cycle(questions), number)
    for one, reply in await _ask_all(url, turns, in_flight):
        outcome.note(one, reply, expected[one.name])
    return outcome


async def _ask_all(url: str, turns: Iterable[Ask], in_flight: int) -> list[tuple[Ask, Reply | None]]:
    async def ask_one(http: httpx.AsyncClient, one: Ask) -> tuple[Ask, Reply | None]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return one, await send(http, one)
        except TimeoutError:
            return one, None

    return await at_once(url, turns, in_flight, ask_one)


async def at_once(
    url: str, turns: Iterable[T], in_flight: int, take: Callable[[httpx.AsyncClient, T], Awaitable[R]]
) -> list[R]:
    """Take all turns, so many at once, by clients of which each takes one after the other; return what came of them."""
    got, left = list[R](), iter(turns)

    async def one_after_the_other(http: httpx.AsyncClient) -> None:
        for one in left:
            got.append(await take(http, one))

    async with AsyncExitStack() as stack:
        clients = [httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) for _ in range(in_flight)]
        for client in clients:
            await stack.enter_async_context(client)
        await asyncio.gather(*map(one_after_the_other, clients))
    return got
