"""The calls of the fake are those of FlashInfer: names, order and defaults, read from the sources of the real package.

Nothing is imported of it. FLASHINFER_SOURCE names the folder of an unpacked wheel; without, the installed one is read.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[2] / "fake_flashinfer"
FILES = ("decode.py", "prefill.py", "page.py", "sampling.py")
USED = {
    "decode.py": ("BatchDecodeWithPagedKVCacheWrapper",),
    "prefill.py": ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"),
    "page.py": ("append_paged_kv_cache",),
    "sampling.py": ("top_p_renorm_probs",),
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
                if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "plan", "_plan_impl", "run"):
                    yield f"{name}.{method.name}", method


def parameters(function: ast.FunctionDef) -> tuple[dict[str, str], dict[str, str]]:
    """Those by position, in order, and those by keyword alone, each with its default; "" where there is none."""
    given = function.args
    defaults = [""] * (len(given.args) - len(given.defaults)) + [ast.unparse(value) for value in given.defaults]
    by_position = dict(zip((arg.arg for arg in given.args), defaults, strict=True))
    keywords = zip((arg.arg for arg in given.kwonlyargs), given.kw_defaults, strict=True)
    return by_position, {name: "" if value is None else ast.unparse(value) for name, value in keywords}


@pytest.mark.parametrize("file", FILES)
def test_the_real_package_takes_every_call_of_the_fake(file: str) -> None:
    source = real_source()
    for name in USED[file]:
        real = {key: parameters(function) for key, function in functions(source / file, name)}
        assert real
        if (plan := real.pop(f"{name}._plan_impl", None)) is not None:  # a plan passes its options on
            real[f"{name}.plan"] = real[f"{name}.plan"][0], plan[1]
        for key, function in functions(FAKE / file, name):
            by_position, keywords = parameters(function)
            real_by_position, real_keywords = real[key]
            assert list(real_by_position.items())[: len(by_position)] == list(by_position.items()), key
            taken = {**real_by_position, **real_keywords}
            assert keywords.items() <= taken.items(), key
            assert all(taken[other] for other in taken.keys() - by_position.keys() - keywords.keys()), key
