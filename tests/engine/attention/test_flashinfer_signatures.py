"""The fake has FlashInfer's own signatures: names, order and defaults, read from the sources of the real package.

Nothing is imported of it. Where it is not installed, FLASHINFER_SOURCE names the folder of an unpacked wheel.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[2] / "fake_flashinfer"
FILES = ("decode.py", "prefill.py", "page.py")
USED = {
    "decode.py": ("BatchDecodeWithPagedKVCacheWrapper",),
    "prefill.py": ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"),
    "page.py": ("append_paged_kv_cache",),
}


def real_source() -> Path:
    given = os.environ.get("FLASHINFER_SOURCE")
    if given:
        return Path(given)
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed, and FLASHINFER_SOURCE names no folder with it")
    return Path(spec.origin).parent


def functions(path: Path, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """A function, or the methods of a class; of overloads the last one, which is the implementation."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield name, node
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "plan", "run"):
                    yield f"{name}.{method.name}", method


def signature(function: ast.FunctionDef) -> list[str]:
    """Parameters in order with their defaults, and where keywords begin."""
    given = function.args
    defaults = [""] * (len(given.args) - len(given.defaults)) + [f"={ast.unparse(value)}" for value in given.defaults]
    names = [f"{arg.arg}{default}" for arg, default in zip(given.args, defaults, strict=True)]
    keywords = [
        f"{arg.arg}={'' if value is None else ast.unparse(value)}"
        for arg, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return [*names, "*", *sorted(keywords)]


@pytest.mark.parametrize("file", FILES)
def test_the_fake_has_the_signatures_of_the_real_package(file: str) -> None:
    source = real_source()
    for name in USED[file]:
        real = {key: signature(function) for key, function in functions(source / file, name)}
        fake = {key: signature(function) for key, function in functions(FAKE / file, name)}
        assert fake == real
        assert real
