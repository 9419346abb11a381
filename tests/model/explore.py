"""Visits every state that a small world can come to, breadth first, so that a counterexample is as short as can be."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

Action = tuple[str, ...]
"""What can happen next, in words: ("deliver", "a", "0")."""


class World(Protocol):
    """A system under test with everything around it. The same actions always lead to the same state."""

    def actions(self) -> list[Action]:
        """All that can happen now, whoever does it and however unlikely it is."""

    def apply(self, action: Action) -> None:
        """Let it happen. Raises where a property does not hold afterwards."""

    def fingerprint(self) -> Hashable:
        """Equal for states that differ in nothing that matters later."""


W = TypeVar("W", bound=World)


@dataclass(frozen=True)
class Explored:
    """How much there was to see."""

    num_states: int
    num_transitions: int


class Counterexample(AssertionError):
    """A property does not hold; the message lists what has happened, in order."""

    def __init__(self, trace: list[Action], error: BaseException) -> None:
        steps = "\n".join(f"  {number:2}. {' '.join(action)}" for number, action in enumerate(trace, 1))
        where = traceback.extract_tb(error.__traceback__)[-1]
        super().__init__(f"{error!r}\nat {where.filename}:{where.lineno}\nafter\n{steps}")


def explore(start: W, copy: Callable[[W], W], visit: Callable[[W], None], max_states: int) -> Explored:
    """Take every action in every state; `visit` sees each state once, in a copy that it may use up.

    Raises Counterexample, and AssertionError where there are more than `max_states`: the world is not small.
    """
    queue: deque[tuple[W, list[Action]]] = deque([(start, [])])
    seen = {start.fingerprint()}
    num_transitions = 0
    while queue:
        world, trace = queue.popleft()
        for action in world.actions():
            num_transitions += 1
            follower, path = copy(world), [*trace, action]
            try:
                follower.apply(action)
                name = follower.fingerprint()
                if name in seen:
                    continue
                seen.add(name)
                assert len(seen) <= max_states, f"more than {max_states} states"
                visit(copy(follower))
            except Exception as error:
                raise Counterexample(path, error) from None
            queue.append((follower, path))
    return Explored(len(seen), num_transitions)
