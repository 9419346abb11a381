"""The registry as followed by a proxy: keeps the proxy's entry and reports changes at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from redis.exceptions import RedisError, ResponseError

from broker.cluster.redis_client import REFUSALS, refused
from broker.cluster.registry import HEARTBEAT_S, Registry
from common.messages import InstanceRecord, Placed
from common.telemetry import get_logger

POLL_S: Final = 0.5
"""How often to look at the registry where it says nothing: of the dead, and where the broker was away."""

log = get_logger()


@dataclass(eq=False, repr=False)
class RegistryWatch:
    """Looks at the registry every POLL_S, and at once when it tells of a change. `_own` is the proxy's record."""

    _registry: Registry
    _own: InstanceRecord
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _last_look_s: float = float("-inf")

    @property
    def broker_reachable(self) -> bool:
        return time.monotonic() - self._last_look_s < 2 * HEARTBEAT_S + POLL_S

    async def look(self, apply: Callable[[dict[str, InstanceRecord]], None]) -> None:
        """Give `apply` all instances whenever they have been read, until cancelled.

        Raises TriptychError("unavailable") where another process has taken this one's instance id, and where the broker
        has never let us in.
        """
        registered = False
        while True:
            began_s = time.monotonic()
            self._changed.clear()
            try:
                if registered:
                    await self._registry.heartbeat()
                else:
                    await self._registry.register(self._own)
                    registered = True
                apply(await self._registry.instances())
                self._last_look_s = time.monotonic()
            except (RedisError, OSError) as error:  # the workers stay: they may well be there
                if isinstance(error, REFUSALS) and not registered:
                    raise refused(error) from error
                log.warning("cannot read the registry", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await asyncio.sleep(time.monotonic() - began_s)  # at most half of the time goes into looks
                    await self._changed.wait()

    async def listen(self, on_placed: Callable[[Placed], None]) -> None:
        """Have `look` look at once when a worker comes, drains or leaves, and give `on_placed` what other proxies tell,
        as far as the broker lets us listen."""
        while True:
            try:
                async with contextlib.aclosing(self._registry.changes()) as changes:
                    async for placed in changes:
                        if placed is None:
                            self._changed.set()
                        elif placed.proxy != self._own.instance_id:
                            on_placed(placed)
            except ResponseError as error:
                why = str(error)
                log.warning("the broker does not let us listen: new workers are used half a second later", error=why)
                return
            except (RedisError, OSError):  # `look` has told it
                await asyncio.sleep(POLL_S)
