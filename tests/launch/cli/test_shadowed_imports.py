"""Folders of the user's that are called as ours are: `common/` and `engine/` beside a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.launch.cli.serving import Serving

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def shadowing(tmp_path: Path) -> Path:
    for name in ("common", "engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user has these')")
    return tmp_path


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "triptych", "--version"]])
def test_a_hidden_folder_is_named_with_what_to_do(shadowing: Path, arguments: list[str]) -> None:
    (shadowing / "script.py").write_text("from triptych import LLM")
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=shadowing, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("ImportError")]
    assert f"`import common` gives {shadowing}/common instead of Triptych's package: rename that folder" in line


def test_without_such_a_folder_beside_it_a_script_finds_everything(shadowing: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", "from triptych import SamplingParams; print(SamplingParams(n=2).n)"]
    ended = subprocess.run(command, cwd=shadowing, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("2\n", "")


def test_a_script_that_uses_llm_is_told_warnings_alone_on_stderr() -> None:
    lines = "log = structlog.get_logger(); log.debug('one'); log.info('two'); log.warning('three')"
    command = [sys.executable, "-P", "-c", f"from triptych import LLM; import structlog; {lines}"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == ""
    assert [word for word in ("one", "two", "three") if word in ended.stderr] == ["three"]


@pytest.mark.cluster
def test_serve_runs_where_such_folders_are(shadowing: Path) -> None:
    serving = Serving(shadowing, "signpost", cwd=shadowing)
    try:
        serving.wait_until("OpenAI API at")
        body = {"prompt": "The", "max_tokens": 2}
        assert httpx.post(f"{serving.base_url}/v1/completions", json=body, timeout=60).is_success
        serving.interrupt()
        assert serving.process.wait(20) == 0
    finally:
        serving.close()
