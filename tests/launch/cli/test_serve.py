"""What `triptych serve` says of a cluster, and what its supervisor knows of workers that change their roles."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from common.config import EngineConfig, Settings
from common.model_info import BUNDLED
from launch.cli.console import ConsoleReporter
from launch.cli.serve import _announce, _example
from launch.cluster import plan as planning
from launch.cluster.plan import Plan, make_plan
from tests.launch.cli.serving import Serving


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_cores", lambda: 4)


def plan_of(folder: Path, architecture: str, topology: str | None = None) -> Plan:
    sizes = {"max_position_embeddings": 64, "max_target_positions": 64, "max_source_positions": 1500, "d_model": 64}
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **sizes}))
    shutil.copy(BUNDLED / "signpost" / "tokenizer.json", folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    engine = EngineConfig(device="cpu")
    return make_plan(Settings(model=str(folder), served_model_name=("it",), port=0, topology=topology, engine=engine))


@pytest.mark.parametrize(
    ("architecture", "topology", "said"),
    [
        ("LlamaForCausalLM", None, "as [bold]1pd[/] (a text-only model: no encoder); CPU threads: 4 for each"),
        ("WhisperForConditionalGeneration", None, "as [bold]2e1pd[/] (speech is mostly encoding: two encoders);"),
        ("WhisperForConditionalGeneration", "1e1pd", "as [bold]1e1pd[/]; CPU threads: 1 for each encoder, 2 for each"),
        ("LlamaForCausalLM", "1p1d", "as [bold]1p1d[/]; CPU threads: 2 for each decode, 2 for each prefill"),
    ],
)
def test_a_topology_that_was_chosen_is_explained(
    tmp_path: Path, architecture: str, topology: str | None, said: str
) -> None:
    assert said in _announce(plan_of(tmp_path, architecture, topology))


def test_the_example_is_something_that_the_model_answers(tmp_path: Path) -> None:
    assert _example(plan_of(tmp_path, "LlamaForCausalLM")).startswith("triptych request --prompt")
    assert _example(plan_of(tmp_path, "WhisperForConditionalGeneration")).startswith(
        "triptych samples && triptych request s"
    )
    assert _example(plan_of(tmp_path, "BartForConditionalGeneration")).startswith("triptych request --prompt")


@pytest.mark.cluster
def test_a_start_says_where_logs_are_who_is_served_and_what_ctrl_c_stops(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "signpost", "--host", "0.0.0.0")
    try:
        serving.wait_until("logs: ")
        serving.interrupt()
        serving.process.wait(20)
        assert "warning: anybody who reaches this port is served: give --api-key-file" in serving.output
        assert f"logs: {serving.temporary}/triptych-logs-" in serving.output
        waited = "stopping pd0, e0, proxy, still waiting for pd0, e0, proxy (Ctrl-C again kills at once)\nstopped\n"
        assert waited in serving.output
    finally:
        serving.close()


@pytest.mark.cluster
def test_a_start_on_a_pipe_tells_each_phase_once(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "signpost", "--topology", "1epd")
    try:
        serving.wait_until("OpenAI API at")
        lines = [line.partition(" · ")[0] for line in serving.output.splitlines() if line.startswith("epd0: ")]
        assert "epd0: measuring memory, warming up" in lines
        assert len(lines) <= 4, "encoder and decoder read weights and measure, one after the other"
        assert all(line != before for before, line in pairwise(lines))
    finally:
        serving.close()


def test_phases_are_told_on_a_pipe_by_name_and_on_a_terminal_with_percent(tmp_path: Path) -> None:
    (worker, *_) = plan_of(tmp_path, "LlamaForCausalLM").instances("redis://127.0.0.1:1", tmp_path)
    assert worker.phase == "starting"
    assert worker.phase_file is not None
    pipe, terminal = io.StringIO(), io.StringIO()
    reporters = (
        ConsoleReporter(Console(file=pipe), "1pd"),
        ConsoleReporter(Console(file=terminal, force_terminal=True), "1pd"),
    )
    for phase in ("", "reading weights 0 %", "reading weights 40 %", "measuring memory, warming up"):
        worker.phase_file.write_text(phase)
        for reporter in reporters:
            reporter.waiting([worker], 1.0)
    reporters[1].stopping([worker])
    assert pipe.getvalue() == "pd0: reading weights · 1.0 s\npd0: measuring memory, warming up · 1.0 s\n"
    assert "measuring memory, warming up) · 1.0 s" in terminal.getvalue()


def test_the_spinner_turns_while_a_cluster_starts(tmp_path: Path) -> None:
    (worker, *_) = plan_of(tmp_path, "LlamaForCausalLM").instances("redis://127.0.0.1:1", tmp_path)
    terminal, now_s = io.StringIO(), itertools.count(0.0, 0.05)
    reporter = ConsoleReporter(Console(file=terminal, force_terminal=True, get_time=lambda: next(now_s)), "1pd")
    for elapsed_s in range(4):
        reporter.waiting([worker], elapsed_s)
        reporter.event("drawn below this line")
    reporter.stopping([])
    assert all(frame in terminal.getvalue() for frame in "⠋⠙")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", "save the model as unquantised safetensors; it has pytorch_model.bin"),
        ("cut off", "cut off"),
        ("other bytes", "model.safetensors (10 bytes) is not a safetensors file"),
    ],
)
def test_weights_that_cannot_be_loaded_are_a_sentence(tmp_path: Path, damage: str, said: str) -> None:
    folder = Path(shutil.copytree(BUNDLED / "signpost", tmp_path / "model"))
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.rename(folder / "pytorch_model.bin")
    elif damage == "cut off":
        os.truncate(weights, weights.stat().st_size // 2)
    else:
        weights.write_bytes(b"no weights")
    serving = Serving(tmp_path, str(folder))
    try:
        assert serving.process.wait(60) == 2
        assert said in serving.output
        assert "Traceback" not in serving.output
        assert list(serving.temporary.iterdir()) == []
    finally:
        serving.close()


def test_a_worker_that_has_changed_its_role_is_started_again_in_the_new_one(tmp_path: Path) -> None:
    (encoder, *_) = (
        one
        for one in plan_of(tmp_path, "WhisperForConditionalGeneration").instances("redis://127.0.0.1:1", tmp_path)
        if one.role == "encoder"
    )
    encoder.epoch = 7
    encoder.take_role("prefill_decode")
    assert encoder.role == "prefill_decode"
    assert encoder.past_epoch == 7
    argv = encoder.command.argv
    assert argv[argv.index("--role") + 1] == "prefill_decode"
