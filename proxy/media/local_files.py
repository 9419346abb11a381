"""file: URLs of media on the server: plain files below a configured folder only."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.errors import TriptychError, invalid


def read_local(url: str, folder: Path | None, param: str, max_bytes: int) -> bytes:
    """Return the bytes of the file named by a file: URL. Blocks: call in a thread.

    `..` and symbolic links are resolved before the check against `folder`: links in the folder cannot lead out.
    Raises TriptychError naming `param`: "invalid_request" for a forbidden or missing file, without telling the two
    apart, "item_too_large" for more than `max_bytes`.
    """
    try:
        parts = urlsplit(url)
        if folder is None or parts.netloc not in ("", "localhost"):
            raise _refused(param)
        root = folder.resolve(strict=True)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(root):
            raise _refused(param)
        with open(_open_below(root, path), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _refused(param)
            if status.st_size > max_bytes:
                raise too_large(status.st_size, max_bytes, param)
            return file.read(max_bytes)
    except (OSError, ValueError, RuntimeError) as error:  # no URL, a missing file, a zero byte, a loop of links
        raise _refused(param) from error


def _open_below(root: Path, path: Path) -> int:
    """Open a resolved path part by part: any part may have become a link meanwhile."""
    *folders, name = path.relative_to(root).parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Without O_NONBLOCK opening a pipe would wait for a writer.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def too_large(size_bytes: int, limit_bytes: int, param: str) -> TriptychError:
    """Return the error of media in the field `param` over the limit."""
    setting = "--max-video-bytes" if param.endswith("video_url.url") else "--max-media-bytes"
    message = f"{param} has {size_bytes} bytes, at most {limit_bytes} are allowed ({setting})"
    return TriptychError("item_too_large", message, param)


def _refused(param: str) -> TriptychError:
    return invalid(f"{param} is not a file that this server may read", param)
