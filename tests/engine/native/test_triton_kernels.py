"""Our Triton kernels without a GPU: in Triton's interpreter they compute what PyTorch does, and they compile for
Hopper."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: PyTorch for CUDA brings it, PyTorch for CPUs does not, and it has 290 MB",
)
ROOT = Path(__file__).parents[3]
SIGNATURES = {
    "engine.native.fused:_add_rms_norm": {
        **dict.fromkeys(("hidden", "added", "weight", "out"), "*bf16"),
        **dict.fromkeys(("size", "rows_together", "outer_stride", "inner_stride"), "i32"),
        "eps": "fp32",
        "HAS_ADDED": True,
        "SIZE": 2048,
    },
    "engine.native.fused:_silu_mul": {
        **dict.fromkeys(("gate_up", "out"), "*bf16"),
        **dict.fromkeys(("row_stride", "size"), "i32"),
        "SIZE": 1024,
    },
    "engine.native.fused:_rotate": {
        **dict.fromkeys(("x", "cosines", "signed_sines"), "*fp16"),
        **dict.fromkeys(("token_stride", "head_stride", "num_heads", "half"), "i32"),
        "HEADS": 16,
        "HALF": 64,
    },
    "engine.attention.flashinfer.paged_write:_write_slots": {
        **dict.fromkeys(("cache", "key", "value"), "*bf16"),
        "slot_mapping": "*i32",
        "side_stride": "i64",
        **dict.fromkeys(("key_stride", "value_stride", "slot_size"), "i32"),
        "SIZE": 256,
    },
}
"""The arguments of each kernel by type, and by value where the compiler knows them."""


def test_kernels_compute_in_the_interpreter_what_pytorch_does() -> None:
    """In a process of its own: Triton reads the setting when it is imported, which somebody else may have done here."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TEST_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stdout
    assert "skipped" not in run.stdout


@pytest.mark.parametrize("name", SIGNATURES)
def test_kernels_compile_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # what an earlier run has compiled proves nothing
    module, function = name.split(":")
    kernel = getattr(importlib.import_module(module), function)
    constants = {key: value for key, value in SIGNATURES[name].items() if not isinstance(value, str)}
    types = {key: "constexpr" if key in constants else value for key, value in SIGNATURES[name].items()}
    assert list(types) == kernel.arg_names
    source = ASTSource(kernel, types, {(kernel.arg_names.index(key),): value for key, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
