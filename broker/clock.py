"""How far this host's clock is from the broker's. Deadlines travel as Unix times, and are read on other hosts: where
clocks differ by a step's timeout, every handoff comes too late, and nothing else would say why."""

from __future__ import annotations

import math
import time
from typing import Final

from redis.exceptions import NoPermissionError, ResponseError

from broker.registry import Registry
from common.telemetry import get_logger

WARN_SKEW_S: Final = 1.0
"""A clock that differs by more is told of."""

log = get_logger()


class ClockWatch:
    """Compares this process's clock with that of the server behind `registry`, whenever `look` is called."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._may_ask = True
        self._warned = False
        self.skew_s = 0.0
        """Seconds by which this host's clock is ahead of the broker's, at least (less than 0: behind it); half the time
        that asking took is taken off, so that a slow network or a busy host never looks like a wrong clock. 0 where the
        broker does not tell its time."""

    async def look(self) -> None:
        """Compare now. Raises RedisError while the broker is away."""
        if not self._may_ask:
            return
        asked_s, began_s = time.time(), time.monotonic()
        try:
            theirs_s = await self._registry.now_s()
        except ResponseError as error:
            self.skew_s, self._warned = 0.0, False
            if isinstance(error, NoPermissionError) or "unknown command" in str(error).lower():
                self._may_ask = False
                log.warning("the broker does not tell its time: clocks cannot be compared", error=str(error))
            return
        half_s = (time.monotonic() - began_s) / 2
        ahead_s = asked_s + half_s - theirs_s
        self.skew_s = math.copysign(max(0.0, abs(ahead_s) - half_s), ahead_s)
        self._tell()

    def _tell(self) -> None:
        differs = abs(self.skew_s) > WARN_SKEW_S
        if differs and not self._warned:
            log.warning(
                "this host's clock is not the broker's: deadlines are missed where hosts differ, synchronise all (NTP)",
                ahead_s=round(self.skew_s, 1),
            )
        elif self._warned and not differs:
            log.info("this host's clock agrees with the broker's again", ahead_s=round(self.skew_s, 1))
        self._warned = differs
