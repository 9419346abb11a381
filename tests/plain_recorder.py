"""A recorder for devices without recording."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class PlainRecorder:
    """Repeat the work by calling the function: the path of recorded steps on any device."""

    size_bytes = 0

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()
        return work
