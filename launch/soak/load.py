"""Keeps a number of requests in flight and counts what comes of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import httpx

from launch.soak.asking import Reply, send
from launch.soak.asks import Ask

PAUSE_S: Final = 0.5
"""After a refusal, before the next request."""
SILENCE_S: Final = 300.0
"""How long a client hears nothing before it calls that a failure: the cores may be busy with something else, too."""
MAX_TOLD: Final = 20


@dataclass
class Tally:
    """Counts of a run; `wrong` and `broken` are its failures, the first of which are told."""

    endings: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    compared: int = 0
    """Answers that were compared with an earlier one to the same request."""
    wrong: int = 0
    told: list[str] = field(default_factory=list)
    _known: dict[str, Reply] = field(default_factory=dict)

    def note(self, ask: Ask, reply: Reply) -> None:
        self.endings[reply.ending] += 1
        self.tokens += sum(map(len, reply.tokens.values()))
        if reply.ending in ("broken", "closed"):
            self._tell(f"{ask.name}: {reply.ending}: {reply.error}")
        if not ask.again:
            return
        known = self._known.get(ask.name)
        if known is None:
            if reply.ending == "whole":
                self._known[ask.name] = reply
            return
        self.compared += 1
        if not (reply.equals(known) if reply.ending == "whole" else reply.begins(known)):
            self.wrong += 1
            self._tell(f"{ask.name}: {dict(reply.tokens)}, and before {dict(known.tokens)}")

    @property
    def failures(self) -> int:
        """Answers that were wrong, and requests that ended as none may while the proxy lives."""
        return self.wrong + self.endings["broken"] + self.endings["closed"]

    def _tell(self, what: str) -> None:
        if len(self.told) < MAX_TOLD:
            self.told.append(what)


async def run_load(base_url: str, asks: Iterator[Ask], tally: Tally, *, in_flight: int, seconds: float) -> None:
    """Send asks until the time is over, `in_flight` at once; returns when the last has ended."""
    end_s = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, keepalive_expiry=20)
    timeout = httpx.Timeout(SILENCE_S)  # connecting takes long where this very process waits for a core
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=limits, trust_env=False) as http:

        async def work() -> None:
            while time.monotonic() < end_s:
                ask = next(asks)
                reply = await send(http, ask)
                tally.note(ask, reply)
                if reply.ending not in ("whole", "left"):
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(work() for _ in range(in_flight)))
