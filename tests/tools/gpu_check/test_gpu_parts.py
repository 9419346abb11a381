"""Checkpoints that are carried in parts are the same when they have been joined, or it is said what is wrong."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tools.gpu_check.parts import cut, join

LIMIT = 2000


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "origin" / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(secrets.token_bytes(3000))
    return folders


def test_what_was_cut_is_joined(checkpoints: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    journeys = cut(checkpoints, folder, LIMIT)
    assert len(journeys) == 4  # of 6000 bytes that nothing shrinks
    for journey in journeys:
        assert 0 < sum(path.stat().st_size for path in journey.glob("*.tar.xz.*")) <= LIMIT
    for _ in range(2):  # again, over what is there
        whole = join(folder)
        for checkpoint in checkpoints:
            for file in checkpoint.iterdir():
                assert (whole / checkpoint.name / file.name).read_bytes() == file.read_bytes()
    assert sorted(path.name for path in whole.iterdir()) == ["one", "two"]


def test_parts_that_are_not_there_or_were_damaged_are_named(checkpoints: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    part = next(cut(checkpoints, folder, LIMIT)[1].glob("one.tar.xz.*"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + b"!")
    with pytest.raises(ValueError, match=r"2/one\.tar\.xz\.1 has other bytes than were sent"):
        join(folder)
    part.unlink()
    with pytest.raises(ValueError, match=r"parts of one are not here: .*2/one\.tar\.xz\.1; carry them first"):
        join(folder)
    part.write_bytes(data)
    assert (join(folder) / "one" / "config.json").read_text() == "{}"


def test_a_folder_of_whole_checkpoints_is_taken_as_it_is(checkpoints: list[Path]) -> None:
    assert join(checkpoints[0].parent) == checkpoints[0].parent


def test_what_is_no_checkpoint_or_has_anothers_name_is_refused(checkpoints: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parts has no config\.json"):
        cut([tmp_path / "parts"], tmp_path / "target")
    with pytest.raises(ValueError, match="two checkpoints are named one"):
        cut([checkpoints[0], checkpoints[0]], tmp_path / "target")
