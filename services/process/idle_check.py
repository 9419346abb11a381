"""An integrity check of an engine at each end of work."""

from __future__ import annotations

from common.telemetry import get_logger
from engine.cache.block_pool import IntegrityError
from engine.core.decoder_engine import DecoderEngine
from engine.state.events import Event

log = get_logger()


class IdleCheck:
    """Steps an engine, and checks its integrity each time the engine becomes empty."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._checked = True

    def step(self, engine: DecoderEngine) -> list[Event]:
        events = engine.step()
        if not engine.is_empty():
            self._checked = False
        elif not self._checked:
            self._checked = True
            try:
                engine.check_integrity()
            except IntegrityError as error:  # a leak is no reason to drop everybody's requests: say it loudly
                self.num_failures += 1
                log.error("the engine's books do not add up", error=str(error))
        return events
