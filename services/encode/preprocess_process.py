"""What runs inside a preprocessing process. Imports little, so that the environment is set before numerics load."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from broker.cluster.lifetime import die_with_parent

if TYPE_CHECKING:
    from engine.processors import ProcessedInput


def initialize(parent_pid: int, model: str, dtype: str) -> None:
    """First call: one CPU thread, gone with the parent, deaf to the terminal's Ctrl-C, the model's processor loaded."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    from engine.processors import init_worker

    init_worker(model, dtype)


def process_item(kind: str, media: bytes) -> ProcessedInput:
    """One item; raises TriptychError("bad_media") for what cannot be decoded."""
    from engine.processors import process

    return process(kind, media)
