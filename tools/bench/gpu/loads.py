"""Loads that others publish figures of, on every system of `serving`: long gaps beside large pictures, and chats whose
pictures repeat."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.bench.client import LoadClient, Outcome
from tools.bench.gpu import serving
from tools.bench.gpu.figures import Figure, durations, rate
from tools.bench.gpu.setup import Setup, noise_image
from tools.bench.gpu.steps import least_step_s
from tools.bench.interference import Phase, run_turn

SIDES: Final = {"4k": 2880, "8k": 5760}
"""Of squares with as many pixels as 3840 x 2160 and 7680 x 4320."""
IN_FLIGHT, SECONDS = 8, 10.0
"""Streams of text, and requests with a picture; seconds of each load."""
USERS, TURNS, WINDOW = 30, 8, 5
TOY_SIDES: Final = {"56-pixel": 56}
TOY_IN_FLIGHT, TOY_SECONDS, TOY_USERS, TOY_TURNS = 1, 0.2, 2, 2


def measure_gaps(setup: Setup, folder: Path, url: str) -> Iterator[Figure]:
    """Yield the gaps between tokens of text streams, alone and beside pictures of 4k and 8k."""
    in_flight, seconds = (TOY_IN_FLIGHT, TOY_SECONDS) if setup.toy else (IN_FLIGHT, SECONDS)
    least_s = least_step_s(setup.limits, folder, setup.dtype, in_flight)

    async def stream(side: int) -> list[float]:
        client, phase = LoadClient(url), Phase()
        clients = in_flight, in_flight if side else 0, side, math.inf
        await run_turn(client, serving.MODEL, phase, seconds, *clients)
        await client.close()
        return [gap for outcome in phase.texts for gap in outcome.gaps_s]

    yield durations("gaps", "text alone", asyncio.run(stream(0)), least_s)
    for name, side in (TOY_SIDES if setup.toy else SIDES).items():
        yield durations("gaps", f"text beside {name} pictures", asyncio.run(stream(side)), least_s)


def measure_window(setup: Setup, folder: Path, url: str) -> Iterator[Figure]:
    """Yield TTFT and TPOT of users who ask about their last five pictures: of first turns all are new, then one is."""
    users, turns = (TOY_USERS, TOY_TURNS) if setup.toy else (USERS, TURNS)
    tokens, side = (serving.TOY_TOKENS, serving.TOY_SIDE) if setup.toy else (serving.TOKENS, serving.SIDE)
    first, later, rng = list[Outcome](), list[Outcome](), random.Random(0)

    async def chat(client: LoadClient) -> None:
        images = [await asyncio.to_thread(noise_image, side) for _ in range(WINDOW)]
        for turn in range(turns):
            (later if turn else first).append(await serving.ask_about(client, images, tokens, rng))
            images = [*images[1:], await asyncio.to_thread(noise_image, side)]

    async def all_chats() -> None:
        client = LoadClient(url)
        await asyncio.gather(*(chat(client) for _ in range(users)))
        await client.close()

    began_s = time.perf_counter()
    asyncio.run(all_chats())
    yield rate("window", f"{users} users, {turns} turns", "turns/s", [time.perf_counter() - began_s], users * turns)
    least_s = least_step_s(setup.limits, folder, setup.dtype, users)
    yield from serving.times(f"{WINDOW} new pictures", first, least_s)
    yield from serving.times(f"1 new picture and {WINDOW - 1} of the last turn", later, least_s)
