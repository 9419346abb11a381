"""Session fixtures with real checkpoints; a conftest that wants them imports their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.weights.cache import PackageMissingError, checkpoint


def _checkpoint_or_skip(name: str) -> Path:
    try:
        return checkpoint(name)
    except PackageMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    return _checkpoint_or_skip("smollm2-135m")


@pytest.fixture(scope="session")
def whisper_tiny_en() -> Path:
    """Whisper tiny.en as a Hugging Face folder."""
    return _checkpoint_or_skip("whisper-tiny.en")
