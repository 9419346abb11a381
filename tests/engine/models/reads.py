"""Which tensors of a checkpoint a load reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common.model_info import load_model_info
from engine.models.checkpoint import Checkpoint
from engine.models.registry import load_decoder, load_encoder


@contextmanager
def noted_reads() -> Iterator[dict[str, int]]:
    """The bytes of each tensor that is read within the block, by its name in the checkpoint."""
    sizes: dict[str, int] = {}
    read_into = Checkpoint.read_into

    def note(checkpoint: Checkpoint, name: str, *given: Any) -> None:
        read_into(checkpoint, name, *given)
        sizes[name] = checkpoint.entries[name].size_bytes

    with mock.patch.object(Checkpoint, "read_into", note):
        yield sizes


def reads_of_both(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """What the encoder and the decoder of a model read."""
    info, where = load_model_info(str(folder)), (torch.device("cpu"), torch.float32)
    with noted_reads() as encoder:
        load_encoder(info, *where)
    with noted_reads() as decoder:
        load_decoder(info, *where)
    return encoder, decoder
