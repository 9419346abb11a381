"""`triptych chat`: history, pictures, pipes, Ctrl-C; against a small server that speaks OpenAI's API."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from common.errors import TriptychError
from launch.cli.client import ClientOptions
from launch.terminal.chat import Chat
from tests.launch.cli.fake_api import FakeApi

ROOT = Path(__file__).parents[3]


def talk(api: FakeApi, *lines: str, system: str = "") -> tuple[int, str]:
    """Exit code and output of a chat on a pipe."""
    out = io.StringIO()
    options = ClientOptions(api.url, None, max_tokens=8, temperature=None, timeout_s=20)
    text = io.StringIO("".join(f"{line}\n" for line in lines))
    return Chat(options, system, text, out, terminal=False).run(), out.getvalue()


def roles(body: dict) -> list[str]:
    return [message["role"] for message in body["messages"]]


def test_on_a_pipe_each_line_is_a_question_and_only_answers_are_printed(api: FakeApi) -> None:
    assert talk(api, "one", "", "two", system="be brief") == (0, "the answer\nthe answer\n")
    first, second = api.bodies
    assert roles(first) == ["system", "user"]
    assert roles(second) == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "the answer"
    assert "temperature" not in first, "the server's own"


def test_a_new_conversation_forgets_the_old_one(api: FakeApi) -> None:
    talk(api, "one", "/new", "two", "/exit", "three")
    assert [roles(body) for body in api.bodies] == [["user"], ["user"]]


def test_pictures_go_with_the_next_question_alone_and_stay_in_the_history(api: FakeApi, tmp_path: Path) -> None:
    Image.new("RGB", (28, 28), "red").save(tmp_path / "my sign.png")
    talk(api, f"/image {tmp_path}/my sign.png", "what is it?", "and now?")
    second = api.bodies[1]["messages"]
    assert [part["type"] for part in second[0]["content"]] == ["image_url", "text"]
    assert second[2]["content"] == "and now?"


def test_faults_are_told_and_the_chat_goes_on(api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clip.wav").touch()
    lines = ("/image nowhere.png", f"/image {tmp_path}/clip.wav", "/imagine", "fail", "one")
    assert talk(api, *lines) == (1, "the answer\n")
    errors = capsys.readouterr().err
    assert "cannot read nowhere.png: No such file or directory" in errors
    assert "is a recording: triptych request" in errors
    assert "no command /imagine; there are:\n  /image PATH" in errors
    assert "this prompt asks for failure" in errors
    assert roles(api.bodies[-1]) == ["user"], "a question without an answer is no history"


def test_a_path_is_a_question_and_no_command(api: FakeApi) -> None:
    talk(api, "/etc/passwd is what?")
    assert api.bodies[0]["messages"][0]["content"] == "/etc/passwd is what?"


def test_without_a_server_it_is_one_sentence() -> None:
    options = ClientOptions("http://127.0.0.1:9", None, max_tokens=8, temperature=None, timeout_s=2)
    with pytest.raises(TriptychError, match="no OpenAI API at"):
        Chat(options, "", io.StringIO("x\n"), io.StringIO(), terminal=False).run()


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(api: FakeApi) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-P", "-m", "triptych", "chat", "--url", api.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True)
    os.close(slave)
    said = ""

    def read_until(text: str) -> None:
        nonlocal said
        while text not in said:
            said += os.read(master, 4096).decode()
        said = said.partition(text)[2]

    try:
        read_until("> ")
        os.write(master, b"hang\n")
        read_until("the ")
        process.send_signal(signal.SIGINT)
        read_until("(stopped)")
        read_until("> ")
        os.write(master, b"go on\n")
        read_until("the answer")
        read_until("2 tokens")
        assert api.bodies[-1]["messages"][1] == {"role": "assistant", "content": "the "}
        read_until("> ")
        os.write(master, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_ctrl_c_on_a_pipe_ends_the_chat(api: FakeApi) -> None:
    command = [sys.executable, "-P", "-m", "triptych", "chat", "--url", api.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdin is not None
        process.stdin.write("hang\n")
        process.stdin.flush()
        assert api.hanging.wait(30)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
