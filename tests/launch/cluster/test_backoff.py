"""Back-off: doubles with early deaths, starts over after a healthy life."""

from __future__ import annotations

from launch.cluster.children import Backoff


def test_early_deaths_double_the_delay_up_to_a_limit() -> None:
    backoff = Backoff(first_s=1, longest_s=5, healthy_after_s=60)
    assert [backoff.after_life_of(0.1) for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_healthy_life_starts_over() -> None:
    backoff = Backoff(first_s=1, longest_s=8, healthy_after_s=60)
    assert [backoff.after_life_of(lived_s) for lived_s in (0, 0, 0, 61, 0)] == [1, 2, 4, 1, 2]
