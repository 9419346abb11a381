"""The commands for a terminal, against a cluster that `serve` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.cli.serving import ROOT, Serving


@pytest.mark.cluster
def test_a_running_cluster_is_watched_talked_to_and_its_logs_are_read(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "signpost", "--topology", "1epd")
    environment = {**os.environ, "TMPDIR": str(serving.temporary), "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    environment.pop("XDG_RUNTIME_DIR", None)

    def run(*arguments: str, text: str = "") -> str:
        command = [sys.executable, "-P", "-m", "triptych", *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        serving.wait_until("OpenAI API at")
        sign = ROOT / "launch" / "demo" / "files" / "sign.png"
        questions = f"/image {sign}\nWhat does the sign say?\nWhat colour is the sign?\n"
        answers = run("chat", "--temperature", "0", text=questions).splitlines()
        assert answers[0] == "CAFE"
        assert len(answers) == 2
        look = run("top", "--once")
        assert "signpost ready" in look
        assert look.count("chat/completions") == 2
        assert "epd0" in look
        assert "request ended" in run("logs", "proxy")
        assert all(line.split()[0] in ("proxy", "epd0") for line in run("logs").splitlines())
    finally:
        serving.close()
