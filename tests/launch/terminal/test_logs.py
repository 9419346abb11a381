"""`triptych logs`: which lines, in which order, and when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import TriptychError
from launch.cluster.local_registry import LocalEntry, announced
from launch.terminal.logs import show_logs
from tests.launch.waiting import eventually

FIRST = "2026-11-25T10:00:00.000001+0000 [info     ] ready  instance=e0\n"
SECOND = "2026-11-25T10:00:00.000002+0000 [error    ] broke\nTraceback:\n  in a file\n"
THIRD = "2026-11-25T10:00:00.000003+0000 [warning  ] slow\n"


@pytest.fixture
def entry(tmp_path: Path) -> LocalEntry:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "e0.log").write_text(FIRST + THIRD)
    (folder / "proxy.log").write_text(SECOND)
    return LocalEntry("triptych", "http://127.0.0.1:8000", "redis://127.0.0.1:1", "", "m", str(folder))


def test_lines_of_all_instances_come_by_time_and_tracebacks_stay_whole(
    entry: LocalEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_logs(entry, None, "debug", None) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["e0", "proxy", "proxy", "proxy", "e0"]


def test_a_level_keeps_the_lines_below_a_heading_of_it(entry: LocalEntry, capsys: pytest.CaptureFixture[str]) -> None:
    show_logs(entry, "proxy", "error", None)
    assert capsys.readouterr().out == SECOND
    show_logs(entry, "e0", "warning", None)
    assert capsys.readouterr().out == THIRD


def test_json_lines_have_a_level_too(entry: LocalEntry, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"event": "a", "level": level, "timestamp": "2026"} for level in ("info", "error")]
    (Path(entry.logs) / "pd0.log").write_text("".join(json.dumps(line) + "\n" for line in [*lines, "{torn"]))
    show_logs(entry, "pd0", "error", None)
    assert capsys.readouterr().out.splitlines() == [json.dumps(lines[1]), '"{torn"']


def test_followed_lines_come_until_the_cluster_ends(entry: LocalEntry, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(entry.logs) / "e0.log").write_text("")
    news: Iterator[str] = iter((FIRST[:20], FIRST[20:]))

    def alive() -> bool:
        piece = next(news, None)
        with (Path(entry.logs) / "new.log").open("a") as log:
            log.write(piece or "")
        return piece is not None

    show_logs(entry, None, "debug", alive)
    assert capsys.readouterr().out.splitlines()[-1] == f"{'new':5} {FIRST.rstrip()}"


def test_an_unknown_instance_or_a_folder_that_is_gone_is_a_sentence(entry: LocalEntry) -> None:
    with pytest.raises(TriptychError, match=r"there is no log of 'e9' in .*: it has e0, proxy"):
        show_logs(entry, "e9", "debug", None)
    nowhere = LocalEntry("triptych", "http://127.0.0.1:8000", "redis://127.0.0.1:1", "", "m", "/nowhere")
    with pytest.raises(TriptychError, match="has no folder of logs"):
        show_logs(nowhere, None, "debug", None)


def test_the_command_finds_the_cluster_and_a_reader_may_leave(
    entry: LocalEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (Path(entry.logs) / "e0.log").write_text(FIRST * 20_000)
    command = [sys.executable, "-P", "-m", "triptych", "logs", "-f"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with announced(entry):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{'e0':5} {FIRST}"
        process.stdout.close()
        eventually(lambda: process.poll() is not None, 30, "the end of a command whose reader has left")
    assert process.returncode == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
