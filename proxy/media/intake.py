"""Media of a request: data URLs, base64, files and downloads become bytes of a known kind, or a 400 naming the field.

The first bytes tell images and audio from other data. Decoding, and with it the check for damage, is the encoder's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common.config import Settings
from common.errors import TriptychError, invalid
from common.media import containers
from common.messages import MAX_MEDIA_BYTES, MediaKind
from proxy.dispatch.jobs import MediaItem
from proxy.media.fair_semaphore import Share, SlotTimeout
from proxy.media.fetch import Fetcher
from proxy.media.local_files import read_local, too_large
from proxy.media.videos import VideoCutter
from proxy.server.limits import Reservation
from proxy.server.metrics import ProxyMetrics

_MAGIC: Final[tuple[tuple[bytes, MediaKind, str], ...]] = (
    (b"\xff\xd8\xff", "image", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image", "png"),
    (b"GIF87a", "image", "gif"),
    (b"GIF89a", "image", "gif"),
    (b"BM", "image", "bmp"),
    (b"II*\0", "image", "tiff"),
    (b"MM\0*", "image", "tiff"),
    (b"fLaC", "audio", "flac"),
    (b"OggS", "audio", "ogg"),
    (b"ID3", "audio", "mp3"),
    (b".snd", "audio", "au"),
    (b"caff", "audio", "caf"),
)
_CONTAINERS: Final[dict[tuple[bytes, bytes], tuple[MediaKind, str]]] = {
    (b"RIFF", b"WEBP"): ("image", "webp"),
    (b"RIFF", b"WAVE"): ("audio", "wav"),
    (b"RF64", b"WAVE"): ("audio", "wav"),
    (b"FORM", b"AIFF"): ("audio", "aiff"),
    (b"FORM", b"AIFC"): ("audio", "aiff"),
}
_EXPECTED: Final = {
    "image": "a picture (JPEG, PNG, WebP, GIF, BMP, AVIF, TIFF)",
    "audio": f"audio (WAV, MP3, FLAC, Ogg, AIFF, {containers.FORMATS})",
    "video": f"a video ({containers.FORMATS})",
}
_WHITESPACE: Final = b" \t\n\r\f\v"
_STRAY_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PIECE: Final = 64 * 2**10
_OFF_LOOP_BYTES: Final = 256 * 2**10
"""Size above which base64 and hashes are computed in a thread: 32 MiB take some 60 ms."""


@dataclass
class MediaSource:
    """Item as named by the request: either `url` (data:, http:, https: or file:) or `data` (base64) is given.

    Loading takes both away: base64 of a video is larger than all that is made of it.
    """

    kind: MediaKind
    param: str
    url: str = ""
    data: str = ""


class MediaIntake:
    """Loader of media items, all items of a request at once, within the limits of the settings."""

    def __init__(
        self, settings: Settings, fetcher: Fetcher, metrics: ProxyMetrics, make_cutter: Callable[[], VideoCutter]
    ) -> None:
        """`make_cutter`, for models with videos, is called with the first one: only then a helper runs. Close this."""
        self._settings = settings
        self._fetcher = fetcher
        self._metrics = metrics
        self._make_cutter = make_cutter
        self._cutter: VideoCutter | None = None
        self._max_bytes = min(settings.max_media_bytes, MAX_MEDIA_BYTES)
        self._max_video_bytes = min(settings.max_video_bytes, MAX_MEDIA_BYTES)
        local = ("file",) if settings.allowed_media_folder is not None else ()
        self._schemes = (*settings.allowed_media_schemes, *local)

    def close(self) -> None:
        if self._cutter is not None:
            self._cutter.close()

    async def load(self, sources: list[MediaSource], held: Reservation) -> list[MediaItem]:
        """Return the items in order, of a video one per piece; `held` reserves the bytes beforehand.

        Raises TriptychError("bad_media"), ("item_too_large") or ("invalid_request"), each naming the field, and
        Overloaded where memory or slots for fetches are taken.
        """
        limit = self._settings.max_media_items
        if len(sources) > limit:
            message = f"{len(sources)} media items in one request, at most {limit} are allowed (--max-media-items)"
            raise invalid(message, sources[limit].param)
        try:
            async with asyncio.TaskGroup() as group:
                share = Share(self._fetcher.slots)
                tasks = [group.create_task(self._load(source, held, share)) for source in sources]
        except* TriptychError as errors:
            first = errors.exceptions[0]
            if isinstance(first, SlotTimeout):
                self._metrics.refused.labels("fetches").inc()
            raise first from None
        return [item for task in tasks for item in task.result()]

    async def of_bytes(self, kind: MediaKind, data: bytes, param: str) -> MediaItem:
        """Return an item of bytes from the request, after checking size and first bytes."""
        self._check(kind, data, param)
        item = await _hashed(kind, data, param)
        self._count(kind, data)
        return item

    async def _pieces(self, data: bytes, param: str, held: Reservation) -> list[MediaItem]:
        """Return the pieces of a video; `held` then covers them in place of the video."""
        self._check("video", data, param)
        self._cutter = self._cutter or self._make_cutter()
        pieces = await self._cutter.pieces(data, param)
        held.reserve(sum(map(len, pieces)))
        held.release(len(data))
        self._count("video", data)
        return [await _hashed("video", piece, param) for piece in pieces]

    def _count(self, kind: MediaKind, data: bytes) -> None:
        self._metrics.media_items.labels(kind).inc()
        self._metrics.media_bytes.labels(kind).inc(len(data))

    def _limit_of(self, kind: MediaKind) -> int:
        return self._max_video_bytes if kind == "video" else self._max_bytes

    async def _load(self, source: MediaSource, held: Reservation, share: Share) -> list[MediaItem]:
        limit = self._limit_of(source.kind)
        scheme = source.url[:8].partition(":")[0].lower()
        if not source.data and scheme not in self._schemes:
            allowed = ", ".join(f"{scheme}:" for scheme in self._schemes)
            setting = "--allowed-media-folder" if scheme == "file" else "--allowed-media-schemes"
            message = f"{source.param} must be a URL with one of {allowed}, not {source.url[:40]!r}"
            raise invalid(f"{message} ({setting} can allow more)", source.param)
        if source.data or scheme == "data":
            text = source.data or source.url
            held.reserve(min(len(text), limit))
            decode = functools.partial(
                self._decode_base64 if source.data else self._decode_data_url, text, source.param, limit
            )
            data = await asyncio.to_thread(decode) if len(text) > _OFF_LOOP_BYTES else decode()
            source.url = source.data = text = ""
            del decode
        elif scheme == "file":
            folder = self._settings.allowed_media_folder
            held.reserve(limit)
            data = await asyncio.to_thread(read_local, source.url, folder, source.param, limit)
            held.release(limit - len(data))
        else:
            data = await self._fetcher.fetch(source.url, source.param, limit, held.reserve, share)
        if source.kind == "video":
            return await self._pieces(data, source.param, held)
        return [await self.of_bytes(source.kind, data, source.param)]

    def _decode_data_url(self, url: str, param: str, limit: int) -> bytes:
        head, comma, body = url[5:].partition(",")
        if not comma:
            raise TriptychError("bad_media", f"{param} is a data: URL without a comma before its data", param)
        if head.lower().endswith(";base64"):
            return self._decode_base64(unquote(body).decode("latin-1") if "%" in body else body, param, limit)
        least = len(body) - 2 * body.count("%")
        if least > limit:
            raise too_large(least, limit, param)
        return unquote(body)

    def _decode_base64(self, text: str, param: str, limit: int) -> bytes:
        if len(text) * 3 // 4 > limit + 3:
            raise too_large(len(text) * 3 // 4, limit, param)
        try:
            data = text.encode("ascii")
            if any(blank in data for blank in _WHITESPACE):
                data = data.translate(None, _WHITESPACE)
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise TriptychError("bad_media", f"{param} is not valid base64: {error}", param) from error

    def _check(self, kind: MediaKind, data: bytes, param: str) -> None:
        if not data:
            raise TriptychError("bad_media", f"{param} is empty", param)
        if len(data) > self._limit_of(kind):
            raise too_large(len(data), self._limit_of(kind), param)
        found = sniff(data)
        if kind == "video" and containers.demuxer(data[: containers.HEAD_BYTES]) is not None:
            return  # a container may have sound or pictures: whoever opens it knows
        if found is None or found[0] != kind:
            what = f"looks like {found[1]}" if found else f"begins with {data[:8]!r}, which is no known format"
            raise TriptychError("bad_media", f"{param} should be {_EXPECTED[kind]}; it {what}", param)
        if found[1] == "heic" and b"avif" not in data[16:64]:  # `mif1` is what a few encoders of AVIF call theirs
            message = f"{param} is a HEIC picture, which is not decoded here: send a JPEG"
            raise TriptychError("bad_media", message, param)


async def _hashed(kind: MediaKind, data: bytes, param: str) -> MediaItem:
    if len(data) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(MediaItem.of, kind, data, param)
    return MediaItem.of(kind, data, param)


def sniff(data: bytes) -> tuple[MediaKind, str] | None:
    """Return kind and format by the first bytes; None if unknown."""
    for magic, kind, name in _MAGIC:
        if data.startswith(magic):
            return kind, name
    if data[4:8] == b"ftyp" and (brand := containers.PICTURE_BRANDS.get(data[8:12])) is not None:
        return "image", brand
    if (container := containers.demuxer(data[: containers.HEAD_BYTES])) is not None:
        return "audio", container
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:  # an MPEG audio frame without a tag
        return "audio", "mp3"
    return _CONTAINERS.get((data[:4], data[8:12]))


def unquote(text: str) -> bytes:
    """Return the bytes of a text with %XX decoded; any other % stays.

    C decodes the same text as quoted-printable, piece by piece: `urllib.parse.unquote_to_bytes` makes two objects per
    encoded byte.
    """
    data, pieces, begin = text.encode(), [], 0
    while begin < len(data):
        end = begin + _PIECE
        if end < len(data) and (split := data.find(b"%", end - 2, end)) >= 0:
            end = split  # keep a % and its digits together
        piece = _STRAY_PERCENT.sub(b"%25", data[begin:end]).replace(b"=", b"%3D")
        pieces.append(binascii.a2b_qp(piece.replace(b"%", b"=")))
        begin = end
    return b"".join(pieces)
