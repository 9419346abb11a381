"""Files that the client sends: known by their suffix, and only such as the server takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import TriptychError
from engine.media.image import FORMATS
from launch.cli.request import MEDIA_TYPES, load_media


def test_a_file_is_sent_as_what_its_suffix_says(tmp_path: Path) -> None:
    (tmp_path / "a.PNG").write_bytes(b"picture")
    media = load_media(tmp_path / "a.PNG")
    assert (media.name, media.type, media.data) == ("a.PNG", "image/png", b"picture")
    assert media.data_url == "data:image/png;base64,cGljdHVyZQ=="


def test_every_format_that_the_server_decodes_has_a_suffix() -> None:
    pictures = {kind.partition("/")[2].upper() for kind in MEDIA_TYPES.values() if kind.startswith("image/")}
    assert pictures == set(FORMATS)
    assert {".m4a", ".aac", ".aiff", ".webm"} <= MEDIA_TYPES.keys()


@pytest.mark.parametrize("name", ["photo.heic", "notes.txt", "none"])
def test_what_the_server_would_refuse_is_not_sent(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(TriptychError, match="neither a picture nor audio"):
        load_media(tmp_path / name)
