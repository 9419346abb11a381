"""Preprocessing of media in child processes, off the loop.

Children import this module before numerics load: it must import little.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

from broker.cluster.lifetime import die_with_parent
from common.messages import MediaKind
from common.process.child_pool import ChildPool

if TYPE_CHECKING:
    from engine.processors import ProcessedInput

MEMORY_BYTES: Final = 2 * 2**30
"""Limit of one item. The largest accepted image, decoded, rotated and resized, takes half."""


class PreprocessPool(ChildPool):
    """Child processes with a model's processor loaded."""

    def __init__(
        self, model: str, dtype: str, num_workers: int, timeout_s: float, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        """Limit each item to `timeout_s` from its start, and to `memory_bytes`."""
        super().__init__(
            initialize,
            (os.getpid(), model, dtype),
            work="preprocessing",
            num_workers=num_workers,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
        )

    async def process(self, kind: MediaKind, media: bytes) -> ProcessedInput:
        """Preprocess one item. Raises TriptychError: "bad_media" as `engine.processors.process` and `run` do."""
        return await self.run(f"this {kind} of {len(media)} bytes", process_item, kind, media)


def initialize(parent_pid: int, model: str, dtype: str) -> None:
    """Prepare a child: one CPU thread, ended with the parent, deaf to the terminal's Ctrl-C, processor loaded."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    from engine.processors import init_worker

    init_worker(model, dtype)


def process_item(kind: str, media: bytes) -> ProcessedInput:
    """Preprocess one item in a child. Raises TriptychError("bad_media") for undecodable media."""
    from engine.processors import process

    return process(kind, media)
