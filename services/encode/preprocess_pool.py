"""Preprocessing of media in processes of its own, off the loop."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from common.messages import MediaKind
from common.process.child_pool import ChildPool
from services.encode.preprocess_process import initialize, process_item

if TYPE_CHECKING:
    from engine.processors import ProcessedInput

MEMORY_BYTES: Final = 2 * 2**30
"""What one item may take: a picture of the most pixels that are accepted, decoded, turned and resized, takes half."""


class PreprocessPool(ChildPool):
    """Processes that have a model's processor loaded."""

    def __init__(
        self, model: str, dtype: str, num_workers: int, timeout_s: float, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        """`timeout_s` and `memory_bytes` bound one item once it has begun."""
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
