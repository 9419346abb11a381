"""Folders of logs: as many as are of use, not as many as there have been starts."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest

from launch.cluster.log_folders import KEPT, PREFIX, LogFolder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path: Path, age: int) -> Path:
    os.utime(path, (10**9 - age, 10**9 - age))
    return path


def test_a_folder_is_removed_or_kept_as_its_supervisor_says(temporary: Path) -> None:
    gone, kept = LogFolder(), LogFolder()
    (gone.path / "e0.log").write_text("fine")
    (kept.path / "e0.log").write_text("why")
    gone.close(keep=False)
    kept.close(keep=True)
    assert list(temporary.iterdir()) == [kept.path]
    assert (kept.path / "e0.log").read_text() == "why"


def test_a_new_folder_costs_the_oldest_of_those_that_nobody_uses(temporary: Path) -> None:
    used = LogFolder()
    aged(used.path, 10**6)
    left = []
    for age in range(KEPT + 3):
        path = temporary / f"{PREFIX}{age}"  # as one of a supervisor that was killed: its lock went with it
        path.mkdir()
        (path / "e0.log").write_text("")
        left.append(aged(path, age))
    other = temporary / "another program's"
    other.mkdir()
    new = LogFolder()
    assert set(temporary.iterdir()) == {used.path, new.path, other, *left[:KEPT]}
    for folder in (used, new):
        folder.close(keep=False)


def test_a_thousand_failed_starts_leave_a_handful(temporary: Path) -> None:
    for _ in range(50):
        LogFolder().close(keep=True)
    assert len(list(temporary.iterdir())) == KEPT + 1


def test_another_supervisors_look_at_a_new_folder_is_waited_for(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, flock = tempfile.mkdtemp, fcntl.flock
    looks: list[int] = []

    def made_and_seen(prefix: str) -> str:
        path = make(prefix=prefix)
        looks.append(os.open(path, os.O_RDONLY))
        flock(looks[0], fcntl.LOCK_EX)
        return path

    def lock(descriptor: int, operation: int) -> None:
        threading.Timer(0.05, os.close, looks).start()  # the look ends while this one waits
        flock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_seen)
    monkeypatch.setattr(fcntl, "flock", lock)
    folder = LogFolder()
    assert folder.path.is_dir()
    folder.close(keep=False)
