"""Images and audio files in the form sent by clients."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from common.errors import TriptychError

MEDIA_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
}


@dataclass(frozen=True)
class Media:
    """An image or audio file for the wire."""

    name: str
    type: str
    data: bytes

    @property
    def data_url(self) -> str:
        return f"data:{self.type};base64,{base64.b64encode(self.data).decode()}"


def load_media(path: Path) -> Media:
    """Return an image or audio file, known by the suffix.

    Raises TriptychError("invalid_request") where it is neither, or cannot be read.
    """
    media_type = MEDIA_TYPES.get(path.suffix.lower())
    if media_type is None:
        known = " ".join(MEDIA_TYPES)
        raise TriptychError("invalid_request", f"{path}: neither a picture nor audio by its suffix; known: {known}")
    try:
        return Media(path.name, media_type, path.read_bytes())
    except OSError as error:
        raise TriptychError("invalid_request", f"cannot read {path}: {error.strerror}") from error
