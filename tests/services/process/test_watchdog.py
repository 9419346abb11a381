"""Which engines hang, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from services.process.watchdog import POLL_S, Watchdog
from tests.clock import Clock


@dataclass(eq=False)
class Thread:
    """An engine's thread as the watchdog sees it. A step begins at `began_s`."""

    clock: Clock
    began_s: float | None = None

    @property
    def busy_s(self) -> float:
        return 0.0 if self.began_s is None else self.clock.now_s - self.began_s


def watching(limit_s: float, count: int = 1) -> tuple[Clock, list[Thread], Watchdog]:
    clock = Clock()
    threads = [Thread(clock) for _ in range(count)]
    return clock, threads, Watchdog(cast(Any, threads), limit_s, clock)


def look_until(clock: Clock, watchdog: Watchdog, seconds: float) -> float | None:
    """Look as often as the watchdog does: after how long it complains, None if it does not within `seconds`."""
    start_s = clock.now_s
    while clock.now_s < start_s + seconds:
        clock.now_s += POLL_S
        if watchdog.look() is not None:
            return clock.now_s - start_s
    return None


def test_a_step_that_does_not_end_is_noticed_at_its_limit() -> None:
    clock, (_, hanging), watchdog = watching(60.0, count=2)
    assert look_until(clock, watchdog, 100.0) is None
    hanging.began_s = clock.now_s
    noticed_s = look_until(clock, watchdog, 100.0)
    assert noticed_s is not None
    assert 60.0 < noticed_s <= 60.0 + POLL_S
    assert "in one step for 61 s" in (watchdog.look() or "")


def test_steps_that_follow_each_other_without_a_pause_are_no_hang() -> None:
    clock, (busy,), watchdog = watching(10.0)
    for _ in range(20):
        busy.began_s = clock.now_s + 0.5
        assert look_until(clock, watchdog, 5.0) is None


def test_the_time_in_which_the_process_was_stopped_is_not_the_engines() -> None:
    clock, (stopped,), watchdog = watching(60.0)
    stopped.began_s = clock.now_s - 0.1
    assert look_until(clock, watchdog, 30.0) is None
    clock.now_s += 600.0
    assert watchdog.look() is None
    noticed_s = look_until(clock, watchdog, 100.0)
    assert noticed_s is not None
    assert 60.0 - 30.0 - 3 * POLL_S < noticed_s < 60.0 - 30.0 + POLL_S


def test_a_step_begun_just_before_the_process_was_stopped_has_its_whole_time() -> None:
    clock, (stopped,), watchdog = watching(60.0)
    clock.now_s += POLL_S
    assert watchdog.look() is None
    stopped.began_s = clock.now_s + 0.1
    clock.now_s += 600.0
    assert watchdog.look() is None
    stopped.began_s = None
    assert look_until(clock, watchdog, 100.0) is None
