"""The public door of Triptych: `from triptych import LLM, SamplingParams`.

Belongs here: the names that users import, and nothing else. May import every other folder, each name on first use: the
proxy and the command line must not load torch. `python -m triptych` is the command line.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.sampling_params import SamplingParams
    from engine.llm import LLM, CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

try:
    __version__ = version("triptych")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def _check_folders() -> None:
    """Raise ImportError where a user's folder hides a package of Triptych: our packages are top-level, with common
    names."""
    for name in ("broker", "common", "engine", "launch", "proxy", "services"):
        spec = find_spec(name)
        found = [*(spec.submodule_search_locations or [spec.origin or ""])] if spec is not None else []
        if not found or Path(found[0]).resolve() != Path(__file__).resolve().parents[1] / name:
            message = f"`import {name}` gives {found[0] if found else 'nothing'} instead of Triptych's package"
            raise ImportError(f"{message}: rename that folder, or start Python elsewhere or as `python -P`", name=name)


_check_folders()


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "SamplingParams":
        from common.sampling_params import SamplingParams

        return SamplingParams
    if name in __all__:
        import structlog

        from common.telemetry import setup_logging
        from engine import llm

        if not structlog.is_configured():  # the default would print every debug line to stdout
            setup_logging("warning", "text", "llm", libraries=False)  # which are the application's
        return getattr(llm, name)
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
