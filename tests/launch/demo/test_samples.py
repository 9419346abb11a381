"""Files to ask about: what is written, that commands beside them hold them, and that models know the answers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import soundfile
from PIL import Image

from common.errors import TriptychError
from launch.cli.app import samples
from launch.demo.run import _next_steps, choose_questions, keep_pictures
from launch.demo.samples import write_samples


def test_the_samples_are_a_picture_a_recording_and_a_text(tmp_path: Path) -> None:
    text = write_samples(tmp_path / "new" / "samples", "http://127.0.0.1:8000")
    assert {path.name for path in (tmp_path / "new" / "samples").iterdir()} == {"sign.png", "speech.flac", "number.txt"}
    samples, rate = soundfile.read(tmp_path / "new" / "samples" / "speech.flac")
    assert 3 < len(samples) / rate < 4
    assert "CAFE" in text
    assert "1204" in text


def test_the_commands_of_the_samples_hold_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    lines = write_samples(folder, "http://127.0.0.1:8123").splitlines()
    commands = [line for line in lines if line.startswith("  ")]
    script = "\n".join(["curl() { printf '%s\\n' CALL \"$@\"; }", 'triptych() { curl triptych "$@"; }', *commands])
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    request, chat, transcribe, upload, prompt, complete = (one.splitlines() for one in said.split("CALL\n")[1:])
    assert request == ["triptych", "request", f"{folder}/sign.png", "--prompt", "What does the sign say?"]
    url = json.loads(chat[-1])["messages"][0]["content"][0]["image_url"]["url"]
    with Image.open(io.BytesIO((folder / "sign.png").read_bytes())) as sign:
        assert sign.format == "PNG"
    assert len(url) > (folder / "sign.png").stat().st_size
    assert transcribe == ["triptych", "request", f"{folder}/speech.flac"]
    assert upload[-1] == f"file=@{folder}/speech.flac"
    assert prompt[-1] == "one thousand two hundred four"
    assert json.loads(complete[-1])["prompt"] == "one thousand two hundred four"


def test_a_file_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "number.txt").write_text("mine")
    with pytest.raises(TriptychError, match=r"number\.txt exists already, with other contents"):
        write_samples(tmp_path, "http://127.0.0.1:8000")
    assert [path.name for path in tmp_path.iterdir()] == ["number.txt"]


def test_written_twice_the_samples_are_the_same(tmp_path: Path) -> None:
    assert write_samples(tmp_path, "http://h:1") == write_samples(tmp_path, "http://h:1")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TriptychError, match=r"cannot write into .*file/below: Not a directory; name another folder"):
        write_samples(tmp_path / "file" / "below", "http://127.0.0.1:8000")


def test_the_bundled_models_know_the_answers(tmp_path: Path) -> None:
    from triptych import LLM, SamplingParams

    write_samples(tmp_path, "http://127.0.0.1:8000")
    greedy = SamplingParams(temperature=0, max_tokens=16)
    parts = [
        {"type": "image", "image": str(tmp_path / "sign.png")},
        {"type": "text", "text": "What does the sign say?"},
    ]
    [sign] = LLM("signpost").chat([{"role": "user", "content": parts}], greedy)
    [number] = LLM("numerals").generate([(tmp_path / "number.txt").read_text().strip()], greedy)
    assert (sign.outputs[0].text, number.outputs[0].text) == ("CAFE", "1204")


def test_kept_pictures_come_with_questions_and_answers(tmp_path: Path) -> None:
    questions = choose_questions(Random(1), 3)
    keep_pictures(tmp_path / "kept", questions)
    lines = [line.split("\t") for line in (tmp_path / "kept" / "answers.txt").read_text().splitlines()]
    assert [line[1:] for line in lines] == [[question.text, question.expected] for question in questions]
    for name, _, _ in lines:
        with Image.open(tmp_path / "kept" / name) as picture:
            picture.verify()


def test_samples_are_written_though_several_clusters_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    monkeypatch.setattr("launch.cluster.local_registry.local_urls", lambda: urls)
    samples(tmp_path / "samples")
    assert (tmp_path / "samples" / "sign.png").exists()
    assert "a --url, http://127.0.0.1:1 or http://127.0.0.1:2" in capsys.readouterr().out


def test_the_demo_says_how_a_new_shell_gets_its_commands() -> None:
    assert f"source {sys.prefix}/bin/activate" in _next_steps(choose_questions(Random(1), 1)[0], None)


def test_the_demo_ends_with_commands_for_its_files() -> None:
    question = choose_questions(Random(1), 1)[0]
    kept = _next_steps(question, Path("my pictures"))
    assert f"triptych request 'my pictures/picture-1.png' --prompt \"{question.text}\"" in kept
    assert "triptych samples" in _next_steps(question, None)
