"""The public door of Triptych: `from triptych import LLM, SamplingParams`.

Belongs here: the names that users import, and nothing else. May import every other folder, each name on first use: the
proxy and the command line must not load torch. `python -m triptych` is the command line.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.sampling_params import SamplingParams
    from engine.llm import LLM, CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

try:
    __version__ = version("triptych")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "SamplingParams":
        from common.sampling_params import SamplingParams

        return SamplingParams
    if name in __all__:
        from engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
