"""Models, cases and a broker as the equality tests have them, but with heads of a size that FlashInfer serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests import tiny_models
from tests.equality.conftest import MAKERS, broker_url, cases_of, folder_of, reference_of
from tests.tiny import encdec, mllama

__all__ = ["broker_url", "cases_of", "folder_of", "reference_of"]

_ENCODER_DECODER: Final[dict[str, Any]] = {
    "d_model": 128,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
_ONE_HEAD: Final[dict[str, Any]] = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Of all 64 columns: transformers takes no other size from this family's configuration."""
_MROPE: Final = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
OWN_MAKERS: Final[dict[str, Callable[..., Path]]] = {
    "llama": partial(tiny_models.make_llama, head_dim=64),
    "qwen2": partial(tiny_models.make_qwen2, head_dim=64, num_attention_heads=14, num_key_value_heads=2),
    "qwen2_5_vl": partial(tiny_models.make_qwen2_5_vl, rope_parameters=_MROPE, **_ONE_HEAD),
    "mllama": partial(mllama.make_mllama, **_ONE_HEAD),
    "bart": partial(encdec.make_bart, **_ENCODER_DECODER),
    "whisper": partial(tiny_models.make_whisper, **_ENCODER_DECODER),
    "t5": partial(encdec.make_t5, d_kv=64),
}


@pytest.fixture(scope="session")
def makers() -> dict[str, Callable[..., Path]]:
    """Functions that write a tiny model, by family."""
    return MAKERS | OWN_MAKERS
