"""Tiny checkpoints of every family, written once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from engine import processors
from tests import tiny_models


@pytest.fixture(autouse=True, scope="session")
def _one_quiet_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _leave_no_worker() -> Iterator[None]:
    yield
    processors._worker = None


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="session")
def qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen2_5_vl(tmp_path_factory.mktemp("models") / "qwen2_5_vl")


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_whisper(tmp_path_factory.mktemp("models") / "whisper")
