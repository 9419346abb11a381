"""State that the parts of one decoder engine share: the live requests, and what the engine has to say."""

from __future__ import annotations

from engine.state.events import Event
from engine.state.request import Request, Sequence


class EngineState:
    """The live requests by id, and the messages for the engine's next output.

    `has_changed`: there may be work for a step although no request can compute.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.outbox: list[Event] = []
        self.has_changed = False

    def emit(self, *events: Event) -> None:
        """Put messages into the next output."""
        self.outbox += events

    def pop_output(self) -> list[Event]:
        """Return the messages since the last call."""
        output, self.outbox = self.outbox, []
        return output

    def is_alive(self, sequence: Sequence) -> bool:
        """Return True while neither the sequence nor the request has ended."""
        request = sequence.request
        return self.requests.get(request.request_id) is request and sequence in request.sequences
