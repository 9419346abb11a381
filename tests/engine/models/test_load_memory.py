"""What a load takes, measured from outside: in a process of its own, by the kernel's counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests import tiny_models

_MEASURE = """
import ctypes, json, re, sys
import torch
import engine.encoders.qwen_vl
import engine.encoders.whisper
from common.model_info import load_model_info
from engine.models.registry import load_decoder, load_encoder

def status(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))

def bytes_read():
    return int(re.search(r"rchar: (\\d+)", open("/proc/self/io").read()).group(1))

jobs = json.loads(sys.argv[1])
load_decoder(load_model_info(sys.argv[2]), torch.device("cpu"), torch.float32)  # what is set up once is set up
for part, folder, dtype in jobs:
    model = None
    ctypes.CDLL(None).malloc_trim(0)  # or the next load would live in what this process has kept
    before_read, before_bytes = bytes_read(), status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    load = {"decoder": load_decoder, "encoder": load_encoder}[part]
    model, num_bytes = load(load_model_info(folder), torch.device("cpu"), getattr(torch, dtype))
    print(json.dumps({
        "read": bytes_read() - before_read,
        "peak": status("VmHWM") - before_bytes,
        "parameters": num_bytes,
    }))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


Job = tuple[str, Path, str]
"""Which part of the model in which folder to load, and as which dtype."""


def measure(jobs: list[Job], warm_up: Path) -> list[dict[str, int]]:
    """What each load took, one after the other in one process."""
    command = [sys.executable, "-c", _MEASURE, json.dumps(jobs, default=str), str(warm_up)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def part_bytes(folder: Path, marker: str) -> int:
    """Bytes of the tensors whose name contains `marker`, by safetensors' own reader."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if marker in name]  # noqa: SIM118  (it is no mapping)
        return sum(file.get_tensor(name).nbytes for name in names)


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """85 MB of float32: far more than anything else that a load touches."""
    return tiny_models.make_llama(
        tmp_path_factory.mktemp("large") / "llama",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        vocab_size=16384,
    )


@pytest.fixture(scope="module")
def large_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_whisper(
        tmp_path_factory.mktemp("large") / "whisper", d_model=256, encoder_ffn_dim=2048, decoder_ffn_dim=1024
    )


@pytest.mark.slow
def test_a_load_takes_its_own_weights_once(large_llama: Path, large_whisper: Path, llama: Path) -> None:
    jobs = [
        ("decoder", large_llama, "float32"),
        ("decoder", large_llama, "bfloat16"),
        ("encoder", large_whisper, "float32"),
        ("decoder", large_whisper, "float32"),
    ]
    same, converted, encoder, decoder = measure(jobs, llama)
    assert same["parameters"] > 80e6
    assert same["peak"] < 1.3 * same["parameters"]
    assert converted["peak"] < converted["parameters"] + 40e6  # a piece at a time is in memory twice
    for numbers, marker in ((encoder, "model.encoder."), (decoder, "model.decoder.")):
        own = part_bytes(large_whisper, marker)
        assert own > 4e6
        assert own <= numbers["read"] < own + 1e6
