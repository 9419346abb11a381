"""What is measured: a system takes a batch of requests at once and tells when each was answered, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.bench.workloads import BenchRequest


@dataclass(frozen=True)
class Outcome:
    """One answered request. Times are seconds since its batch was handed in."""

    text: str
    num_tokens: int
    latency_s: float
    ttft_s: float | None = None
    """Time to the first token; None where the system does not tell."""
    request_id: str = ""


class System(Protocol):
    """Something that answers requests."""

    name: str

    def run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        """Answer all at once: `len(batch)` requests in flight from the start."""

    def close(self) -> None:
        """Give back processes and memory."""
