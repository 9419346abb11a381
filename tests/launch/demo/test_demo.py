"""The demo, as `make demo` runs it."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from launch.demo.run import choose_questions


def test_its_questions_have_known_answers() -> None:
    questions = choose_questions(random.Random(1), 7)
    assert len(questions) == 7
    assert all(question.expected for question in questions)
    assert {question.text for question in questions} == {
        question.text for question in choose_questions(random.Random(1), 7)
    }


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_it_answers_draws_timelines_and_ends_well() -> None:
    command = [sys.executable, "-m", "launch.cli.app", "demo", "--pictures", "4"]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "4 of 4 requests answered" in demo.stdout
    assert "8 of 8 numbers and dates right" in demo.stdout
    for stage in ("encode", "handoff", "queue", "prefill", "decode"):
        assert demo.stdout.count(f"\n{stage} ") == 4, f"{stage}:\n{demo.stdout}"
    assert "stopped" in demo.stdout
