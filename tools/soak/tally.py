"""What came of a load: counts that travel as JSON, and the comparison of each answer with the one before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tools.soak.asking import Reply
from tools.soak.asks import Ask

MAX_TOLD: Final = 20
MAX_TOLD_CHARS: Final = 2000


@dataclass
class Tally:
    """Counts of a run; `wrong` and some endings are its failures, the first of which are told."""

    endings: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    compared: int = 0
    """Answers that were compared with an earlier one to the same request."""
    wrong: int = 0
    told: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """Answers that were wrong, and requests that ended as none may while the proxy lives."""
        return self.wrong + self.endings.get("broken", 0) + self.endings.get("closed", 0)

    def keep(self, what: str) -> None:
        """Keep a line for the report, unless there are enough already."""
        if len(self.told) < MAX_TOLD:
            self.told.append(what[:MAX_TOLD_CHARS])


class Judge:
    """Counts replies. Remembers one whole reply to each ask that comes again: the plan has `asks.REPEATED` of them."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._known: dict[str, Reply] = {}

    def note(self, ask: Ask, reply: Reply) -> None:
        """Count a reply, and compare it with the one that is known, if any."""
        tally = self.tally
        tally.endings[reply.ending] = tally.endings.get(reply.ending, 0) + 1
        tally.tokens += sum(map(len, reply.tokens.values()))
        if reply.ending in ("broken", "closed"):
            tally.keep(f"{ask.name}: {reply.ending}: {reply.error}")
        if not ask.again:
            return
        known = self._known.get(ask.name)
        if known is None:
            if reply.ending == "whole":
                self._known[ask.name] = reply
            return
        tally.compared += 1
        if not (reply.equals(known) if reply.ending == "whole" else reply.begins(known)):
            tally.wrong += 1
            tally.keep(f"{ask.name}: {dict(reply.tokens)}, and before {dict(known.tokens)}")
