"""Steady load on an API: so many requests in flight, each about media that no cache knows."""

from __future__ import annotations

import asyncio
import itertools

import httpx

from tests.chaos.asks import salted
from tools.soak.asking import Reply, send
from tools.soak.asks import Ask


async def keep_asking(
    http: httpx.AsyncClient, asks: list[Ask], in_flight: int, over: asyncio.Event, got: list[tuple[Ask, Reply]]
) -> None:
    """Note each reply in `got`, until `over`, and then for one more request of each of the `in_flight`."""
    salts = itertools.count()

    async def one_after_the_other(slot: int) -> None:
        for turn in itertools.count():
            last = over.is_set()
            ask = asks[(slot + turn * in_flight) % len(asks)]
            got.append((ask, await send(http, salted(ask, f"salt {next(salts)}"))))
            if last:
                return

    await asyncio.gather(*(one_after_the_other(slot) for slot in range(in_flight)))
