"""The fake where the engine looks for FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn
from unittest import mock

import torch

from engine.attention.flashinfer import served, wrappers
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.ragged import FlashInferRagged
from engine.attention.flashinfer.wrappers import Workspace, load_flashinfer
from engine.attention.select import BACKENDS
from engine.state.spec import HeadSpec
from tests import fake_flashinfer
from tests.fake_flashinfer import dense, sampling

CPU = torch.device("cpu")
WORKSPACE_BYTES = 2**20


def make_backend(head_dim: int = 64) -> FlashInferBackend:
    """A backend on the CPU that computes with the fake."""
    with _installed():
        return FlashInferBackend(CPU, torch.bfloat16, HeadSpec(2, 2, head_dim))


def make_ragged() -> FlashInferRagged:
    """The same for encoders."""
    with _installed():
        return FlashInferRagged(Workspace(load_flashinfer(), CPU, WORKSPACE_BYTES))


def no_compiler(*_: object, **__: object) -> NoReturn:
    """What a plan or a call raises where its kernels are neither built ahead nor can be compiled."""
    raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")


@contextmanager
def flashinfer_on_cpu(head_dims: Collection[int] = dense.HEAD_DIMS) -> Iterator[None]:
    """Engines made within the block may have the backend "flashinfer" on a CPU, which computes with the fake.

    In float32, too, where two ways to compute the same thing give the same tokens; and with heads of `head_dims`.
    """
    dtypes = BACKENDS["flashinfer"].dtypes | {torch.float32}
    entry = replace(BACKENDS["flashinfer"], devices=frozenset({"cpu"}), dtypes=dtypes)
    with (
        _installed(),
        mock.patch.dict(BACKENDS, {"flashinfer": entry}),
        mock.patch.object(served, "DTYPES", dtypes),
        mock.patch.object(dense, "DTYPES", dtypes),
        mock.patch.object(served, "HEAD_DIMS", frozenset(head_dims)),
        mock.patch.object(dense, "HEAD_DIMS", head_dims),
    ):
        yield


@contextmanager
def _installed() -> Iterator[None]:
    """With a small workspace: the fake does not write to it."""
    fakes = {"flashinfer": fake_flashinfer, "flashinfer.sampling": sampling}
    modules = mock.patch.dict(sys.modules, fakes)
    with modules, mock.patch.object(wrappers, "WORKSPACE_BYTES", WORKSPACE_BYTES):
        yield
