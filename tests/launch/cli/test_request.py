"""The parallel client: what it sends, prints and returns, against a small server that speaks OpenAI's API."""

from __future__ import annotations

import base64
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from common.errors import TriptychError
from launch.cli.answers import latency_table, summary
from launch.cli.client import ClientOptions, ClientRequest, ClientResult, client_options
from launch.cli.request import load_media, make_jobs, run_requests
from tests.launch.cli.fake_api import FakeApi


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path in paths:
        Image.new("RGB", (28, 28), "red").save(path)
    return paths


def request(api: FakeApi, files: list[Path], prompt: str, **more: object) -> int:
    options = ClientOptions(api.url, None, max_tokens=8, temperature=0.0, timeout_s=20)
    arguments = {"parallel": 4, "repeat": 1, "live": False, "together": False, **more}
    return run_requests(files, prompt, options, **arguments)  # type: ignore[arg-type]


def test_a_prompt_alone_is_answered_and_measured(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert request(api, [], "hello") == 0
    output = capsys.readouterr().out
    assert "the answer" in output
    assert "1 of 1 requests answered" in output
    assert "first token after" in output
    assert "p50" not in output, "one request has no percentiles"
    body = api.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 8, 0.0)
    assert body["messages"] == [{"role": "user", "content": "hello"}]


def test_a_model_without_conversations_completes_the_prompt(
    api: FakeApi, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert request(api, [], "one thousand two hundred four") == 0
    assert "1204" in capsys.readouterr().out
    assert api.bodies[1]["prompt"] == "one thousand two hundred four"
    assert request(api, pictures[:1], "a hundred?") == 1, "the picture would be lost"


def test_many_requests_have_percentiles(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert request(api, [], "hello", repeat=3) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("TTFT", "latency", "tokens/s", "p50", "p90", "p99"))


def test_an_address_needs_no_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ("127.0.0.1:8123", "http://127.0.0.1:8123/v1/", "http://127.0.0.1:8123")
    assert {client_options(url, None, 1, None, 1.0).url for url in urls} == {"http://127.0.0.1:8123"}


@pytest.mark.parametrize("url", ["http://localhost:80x", "http://localhost:80808", "http://[::1", "http://a\x01"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(TriptychError, match=re.escape(f"{url} is no URL")) as raised:
        client_options(url, None, 1, None, 1.0)
    assert raised.value.info.code == "invalid_request"


def test_every_picture_is_a_request_of_its_own(api: FakeApi, pictures: list[Path]) -> None:
    assert request(api, pictures, "what?") == 0
    assert len(api.bodies) == 2
    parts = [body["messages"][0]["content"] for body in api.bodies]
    urls = sorted(part[0]["image_url"]["url"] for part in parts)
    assert urls[0].startswith("data:image/jpeg;base64,")
    assert base64.b64decode(urls[1].removeprefix("data:image/png;base64,")) == pictures[0].read_bytes()


def test_together_puts_all_pictures_into_one_request(api: FakeApi, pictures: list[Path]) -> None:
    assert request(api, pictures, "which?", together=True) == 0
    (body,) = api.bodies
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "image_url", "text"]


@pytest.mark.parametrize("prompt", ["", "answer in one piece"], ids=["streamed", "in one piece"])
def test_audio_goes_to_the_transcriptions(
    api: FakeApi, prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "speech.flac").write_bytes(b"fLaC" + bytes(100))
    assert request(api, [tmp_path / "speech.flac"], prompt) == 0
    assert api.uploads == [("speech.flac", "audio/flac", 104)]
    assert "✓ speech.flac: spoken words " in capsys.readouterr().out


@pytest.mark.parametrize(("given", "said"), [(None, "wants an API key: set TRIPTYCH_"), ("x", "does not accept")])
def test_a_missing_or_wrong_key_is_said_to_be_one(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, given: str | None, said: str
) -> None:
    monkeypatch.setattr(api, "key", "right")
    options = ClientOptions(api.url, None, max_tokens=8, temperature=0.0, timeout_s=20, api_key=given)
    with pytest.raises(TriptychError, match=said) as raised:
        run_requests([], "hello", options, parallel=1, repeat=1, live=False, together=False)
    assert raised.value.info.code == "invalid_api_key"


def test_no_more_than_parallel_requests_are_in_flight(api: FakeApi) -> None:
    assert request(api, [], "hello", repeat=12, parallel=3) == 0
    assert len(api.bodies) == 12
    assert api.most_in_flight == 3


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("fail", "HTTP 400: messages: this prompt asks for failure"), ("cut", "the stream ended before the answer did")],
)
def test_a_failed_request_is_named_with_its_reason(
    api: FakeApi, prompt: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert request(api, [], prompt, repeat=2) == 1
    output = capsys.readouterr().out
    assert "2 failed:" in output
    assert f"prompt #2: {reason}" in output


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"error": "no memory"}', "✗ prompt: no memory"),
        ('{"choices": ["text"]}', "✗ prompt: the answer is not as OpenAI's API has it"),
        ('{"choices": [{"delta": null}], "error": null, "usage": null}', "✓ prompt: the answer "),
        ('{"choices": [], "delta": null}', "✓ prompt: the answer "),
    ],
)
def test_an_odd_event_ends_no_more_than_its_request(
    api: FakeApi, event: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert request(api, [], event) == int(said.startswith("✗"))
    assert said in capsys.readouterr().out


def test_a_timeout_is_a_failure(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    options = ClientOptions(api.url, None, max_tokens=8, temperature=0.0, timeout_s=0.3)
    assert run_requests([], "hang", options, parallel=1, repeat=1, live=False, together=False) == 1
    assert "✗ prompt: no whole answer within 0.3 s" in capsys.readouterr().out


def test_an_answer_that_grows_for_ever_is_waited_for_no_longer(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ClientOptions(api.url, None, max_tokens=8, temperature=0.0, timeout_s=0.5)
    assert run_requests([], "drip", options, parallel=1, repeat=1, live=False, together=False) == 1
    assert "✗ prompt: no whole answer within 0.5 s" in capsys.readouterr().out


def test_ctrl_c_cancels_and_tells_what_was_done(api: FakeApi) -> None:
    command = [sys.executable, "-m", "launch.cli.app", "request", "--prompt", "hang", "--url", api.url, "--stream"]
    api.hanging.clear()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert api.hanging.wait(20)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted: 1 requests did not end" in output


def test_a_rate_of_tokens_is_told_where_tokens_are_counted() -> None:
    outcome = ClientResult(ClientRequest("a.wav", ""), latency_s=2.0, text="words")
    assert summary([outcome], 2.0) == "1 of 1 requests answered in 2.00 s · 0.50 requests/s"


def test_nobody_there_is_one_clear_error() -> None:
    options = ClientOptions("http://127.0.0.1:1", None, max_tokens=8, temperature=0.0, timeout_s=5)
    with pytest.raises(TriptychError, match=r"no OpenAI API at http://127.0.0.1:1 .*triptych serve"):
        run_requests([], "hello", options, parallel=1, repeat=1, live=False, together=False)


def test_somebody_who_says_nothing_is_told_by_the_name_of_the_error() -> None:
    """Python has no words for a time that is over."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = ClientOptions(url, None, max_tokens=8, temperature=0.0, timeout_s=0.1)
        with pytest.raises(TriptychError, match=r"\(ReadTimeout\)"):
            run_requests([], "hello", options, parallel=1, repeat=1, live=False, together=False)


def test_files_that_make_no_request_are_refused(pictures: list[Path], tmp_path: Path) -> None:
    clip = tmp_path / "speech.wav"
    clip.write_bytes(b"RIFF")
    with pytest.raises(TriptychError, match="neither a picture nor audio"):
        load_media(tmp_path / "notes.txt")
    with pytest.raises(TriptychError, match="nothing to ask"):
        make_jobs(pictures, "", together=False)
    with pytest.raises(TriptychError, match=r"speech\.wav is audio"):
        make_jobs([*pictures, clip], "x", together=True)


def test_percentiles_of_the_rate_show_the_slow_tail() -> None:
    outcomes = [
        ClientResult(ClientRequest("x", "x"), ttft_s=0.1, latency_s=s / 10, completion_tokens=10) for s in range(1, 101)
    ]
    outcomes.append(ClientResult(ClientRequest("y", "y"), error="HTTP 500", latency_s=0.01))
    cells = [list(column.cells) for column in latency_table(outcomes).columns]
    assert cells[1] == ["100 ms", "5.05 s", "2.0"]
    assert cells[3] == ["100 ms", "9.90 s", "1.0"]
    assert summary(outcomes, 10.0) == "100 of 101 requests answered in 10.00 s · 10.00 requests/s · 100.0 tokens/s"
