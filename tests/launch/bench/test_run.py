"""`triptych bench` against a small server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from PIL import Image

from common.errors import TriptychError
from launch.bench.run import BenchPlan, parse_levels, run_bench
from launch.cli.client import ApiClient, ClientOptions
from launch.cli.request import make_jobs
from launch.demo.samples import FILES
from tests.launch.cli.fake_api import FakeApi

ROOT = Path(__file__).parents[3]


def options(api: FakeApi, **more: object) -> ClientOptions:
    return ClientOptions(api.url, None, max_tokens=8, temperature=0.0, timeout_s=20, **more)  # type: ignore[arg-type]


def test_a_sweep_warms_up_measures_exports_and_draws(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objectives = {"request_latency": 20_000.0}
    levels = parse_levels("1,4", "", constant=False)
    plan = BenchPlan(levels, 6, 3, False, 0, objectives, tmp_path / "out.json", tmp_path / "out.svg")
    assert run_bench(make_jobs([], "hello", together=False), options(api, extra={"ignore_eos": True}), plan) == 0
    said = capsys.readouterr()
    assert "6 of 6 requests answered" in said.out
    assert "goodput" in said.out
    assert "answers of 2 tokens are too short for gaps: more --max-tokens, or ignore_eos" in said.out
    assert said.err.splitlines() == ["1 in flight: 6 of 6 requests ended", "4 in flight: 6 of 6 requests ended"]
    assert len(api.bodies) == 3 + 2 * 6
    assert all(body["ignore_eos"] is True for body in api.bodies)
    assert api.most_in_flight == 4
    exported = json.loads((tmp_path / "out.json").read_text())
    assert [run["level"] for run in exported["runs"]] == ["1 in flight", "4 in flight"]
    for run in exported["runs"]:
        assert (run["requests"], run["failed"], len(run["records"])) == (6, 0, 6)
        assert run["goodput"] == run["request_throughput"] > 0
        assert run["metrics"]["output_tokens"]["p50"] == 2
        assert all(record["time_to_first_token"] <= record["request_latency"] for record in run["records"])
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_in_an_open_loop_no_request_waits_for_another(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    plan = BenchPlan(parse_levels("", "5000", constant=True), 40, 0, False, 0)
    assert run_bench(make_jobs([], "hello", together=False), options(api), plan) == 0
    assert "5000 requests/s, evenly" in capsys.readouterr().out
    assert api.most_in_flight > 4


def test_failures_are_counted_by_their_message_and_the_exit_code_is_1(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = BenchPlan(parse_levels("2", "", constant=False), 3, 0, False, 0)
    assert run_bench(make_jobs([], "please fail", together=False), options(api), plan) == 1
    output = capsys.readouterr().out
    assert "0 of 3 requests answered" in output
    assert "3 failed: HTTP 400: messages: this prompt asks for failure" in output


def test_a_model_without_conversations_is_asked_for_one_only_once(api: FakeApi) -> None:
    plan = BenchPlan(parse_levels("1", "", constant=False), 5, 1, False, 0)
    assert run_bench(make_jobs([], "a hundred", together=False), options(api), plan) == 0
    assert ["prompt" in body for body in api.bodies] == [False] + [True] * 6


def test_a_warm_up_that_fails_ends_the_benchmark(api: FakeApi) -> None:
    plan = BenchPlan(parse_levels("2", "", constant=False), 3, 1, False, 0)
    with pytest.raises(TriptychError, match="the warm-up failed: HTTP 400"):
        run_bench(make_jobs([], "please fail", together=False), options(api), plan)
    assert len(api.bodies) == 1


def test_fresh_pictures_are_alike_to_the_eye_and_to_no_cache(api: FakeApi) -> None:
    plan = BenchPlan(parse_levels("2", "", constant=False), 4, 0, True, 0)
    assert run_bench(make_jobs([FILES / "sign.png"], "what?", together=False), options(api), plan) == 0
    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in api.bodies]
    pictures = [base64.b64decode(url.partition(",")[2]) for url in urls]
    assert len({hashlib.sha256(picture).digest() for picture in pictures}) == 4
    with Image.open(FILES / "sign.png") as first, Image.open(io.BytesIO(pictures[0])) as second:
        assert first.size == second.size
        pairs = zip(first.convert("RGB").tobytes(), second.tobytes(), strict=True)
        assert max(abs(a - b) for a, b in pairs) == 1


def test_recordings_are_transcribed_and_fresh_ones_keep_their_length(api: FakeApi) -> None:
    plan = BenchPlan(parse_levels("1", "", constant=False), 2, 0, True, 0)
    assert run_bench(make_jobs([FILES / "speech.flac"], "", together=False), options(api), plan) == 0
    assert [kind for _, kind, _ in api.uploads] == ["audio/flac"] * 2
    assert soundfile.info(FILES / "speech.flac").frames > 50_000


def test_a_file_that_cannot_be_written_is_told_before_anything_is_sent(api: FakeApi, tmp_path: Path) -> None:
    plan = BenchPlan(parse_levels("1", "", constant=False), 2, 0, False, 0, {}, tmp_path / "no" / "out.json")
    with pytest.raises(TriptychError, match="there is no folder"):
        run_bench(make_jobs([], "hello", together=False), options(api), plan)
    assert api.bodies == []


def test_ctrl_c_reports_what_has_ended(api: FakeApi) -> None:
    api.hanging.clear()
    command = [sys.executable, "-P", "-m", "triptych", "bench", "-p", "hang", "--url", api.url, "--warm-up", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert api.hanging.wait(30)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "0 of 0 requests answered" in output
    assert "1 in flight: 0 of 100 requests ended" in errors


def test_ctrl_c_after_the_last_level_loses_no_figures(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupt_closing(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)

    monkeypatch.setattr(ApiClient, "__aexit__", interrupt_closing)
    plan = BenchPlan(parse_levels("1", "", constant=False), 3, 0, False, 0, {}, tmp_path / "out.json")
    assert run_bench(make_jobs([], "hello", together=False), options(api), plan) == 130
    assert "3 of 3 requests answered" in capsys.readouterr().out
    exported = json.loads((tmp_path / "out.json").read_text())
    assert [(exported["model"], run["requests"]) for run in exported["runs"]] == [("fake", 3)]
