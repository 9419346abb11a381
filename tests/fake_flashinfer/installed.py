"""The fake where the engine looks for FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from engine.attention import flashinfer_backend, served
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.select import BACKENDS
from tests import fake_flashinfer
from tests.fake_flashinfer import dense

CPU = torch.device("cpu")


def make_backend(head_dim: int = 64) -> FlashInferBackend:
    """A backend on the CPU that computes with the fake."""
    with _installed():
        return FlashInferBackend(CPU, head_dim)


@contextmanager
def flashinfer_on_cpu() -> Iterator[None]:
    """Engines made within the block may have the backend "flashinfer" on a CPU, which computes with the fake.

    In float32, too, where two ways to compute the same thing give the same tokens.
    """
    dtypes = BACKENDS["flashinfer"].dtypes | {torch.float32}
    entry = replace(BACKENDS["flashinfer"], devices=frozenset({"cpu"}), dtypes=dtypes)
    with (
        _installed(),
        mock.patch.dict(BACKENDS, {"flashinfer": entry}),
        mock.patch.object(served, "DTYPES", dtypes),
        mock.patch.object(dense, "DTYPES", dtypes),
    ):
        yield


@contextmanager
def _installed() -> Iterator[None]:
    """With a small workspace: the fake has no use for it."""
    modules = mock.patch.dict(sys.modules, {"flashinfer": fake_flashinfer})
    with modules, mock.patch.object(flashinfer_backend, "WORKSPACE_BYTES", 1024):
        yield
