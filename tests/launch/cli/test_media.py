"""Files that the client sends: known by their suffix, and only such as the server takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import TriptychError
from launch.cli.request import load_media


def test_a_file_is_sent_as_what_its_suffix_says(tmp_path: Path) -> None:
    (tmp_path / "a.PNG").write_bytes(b"picture")
    media = load_media(tmp_path / "a.PNG")
    assert (media.name, media.type, media.data) == ("a.PNG", "image/png", b"picture")
    assert media.data_url == "data:image/png;base64,cGljdHVyZQ=="


@pytest.mark.parametrize("name", ["clip.m4a", "scan.tiff", "notes.txt", "none"])
def test_what_the_server_would_refuse_is_not_sent(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(TriptychError, match="neither a picture nor audio"):
        load_media(tmp_path / name)
