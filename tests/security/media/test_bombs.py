"""Bombs, damaged files and files that are not what they say, through the processes that really decode them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from common.errors import TriptychError
from engine.media.image import decode_image
from proxy.media.audio import AudioWindows
from proxy.media.helper_process import shared
from services.encode import preprocess_pool
from services.encode.preprocess_pool import PreprocessPool
from tests.proxy.sample_media import data_url, image_part, picture, speech
from tests.security.media import bombs

MEMORY_BYTES = 256 * 2**20


@pytest.fixture(scope="module")
def pictures() -> dict[str, bytes]:
    """Every one of them a bad picture, and less than a megabyte."""
    found = {
        "a PNG of 2.5 billion pixels": bombs.png_bomb(50_048, 50_048),
        "a JPEG that claims 4 billion": bombs.jpeg_bomb(),
        "a WebP animation on the largest canvas": bombs.webp_bomb(),
        "a PNG that is cut off": picture()[: len(picture()) // 2],
        "a PNG that is a header alone": picture()[:33],
        "a JPEG in a PNG's clothes": b"\x89PNG\r\n\x1a\n" + bombs.encoded(Image.new("RGB", (9, 9)), "JPEG"),
        "a sound": speech(0.1),
    }
    assert max(map(len, found.values())) < 2**20
    return found


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PreprocessPool]:
    monkeypatch.setattr(preprocess_pool, "MEMORY_BYTES", MEMORY_BYTES)
    pool = PreprocessPool("signpost", "float32", num_workers=1, timeout_s=20, staging_bytes=2**30)
    await pool.warm_up(60)
    yield pool
    pool.close()


@pytest.fixture
async def recordings() -> AsyncIterator[AudioWindows]:
    pool = AudioWindows()
    yield pool
    pool.close()


def peak_bytes(pool: Any) -> int:
    """The most memory that any of the helpers has had."""
    found = 0
    for child in pool._executor._processes.values():
        status = Path(f"/proc/{child.pid}/status").read_text()
        found = max(found, int(status.partition("VmHWM:")[2].split()[0]) * 1024)
    return found


async def test_pictures_that_explode_are_refused_by_their_header(pool, pictures):
    idle = peak_bytes(pool)
    for what, data in pictures.items():
        with pytest.raises(TriptychError) as caught:
            await pool.process("image", data)
        assert (what, caught.value.info.code) == (what, "bad_media")
    assert pool.num_crashes == 0
    assert peak_bytes(pool) - idle < 32 * 2**20
    assert await pool.process("image", picture()) is not None


async def test_a_comment_that_explodes_does_not(pool):
    """PIL reads text, too: bounded, whether it takes the picture or not."""
    idle = peak_bytes(pool)
    try:
        await pool.process("image", bombs.text_bomb())
    except TriptychError as error:
        assert "cannot be decoded" in str(error)  # noqa: PT017  (either end is fine, no other is)
    assert peak_bytes(pool) - idle < 64 * 2**20


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_of_an_animation_only_the_first_picture_is_decoded(form):
    picture = decode_image(bombs.many_frames(form, 40))
    assert picture.size == (512, 512)
    assert getattr(picture, "n_frames", 1) == 1


async def test_a_picture_that_takes_more_memory_than_it_may(pool):
    """80 million pixels are within the limit of pixels, 240 MB of them not within the memory that this pool allows."""
    for _ in range(2):
        with pytest.raises(TriptychError, match=r"memory|cannot be decoded|crashed"):
            await pool.process("image", bombs.png_bomb(9_984, 8_000))
    assert await pool.process("image", picture()) is not None


SOUNDS = {
    "two hours and more": (bombs.silence(7300), "item_too_large"),
    "a length that it does not tell": (bombs.of_unknown_length(bombs.silence(7300)), "bad_media"),
    "655 kHz": (bombs.wav_header(655_350, 2, 2**31), "bad_media"),
    "1000 channels": (bombs.wav_header(48_000, 1000, 2**31), "bad_media"),
    "500 Hz": (bombs.wav_header(500, 1, 1000), "bad_media"),
    "a FLAC that is cut off": (bombs.silence(100)[:200], "bad_media"),
    "noise behind OggS": (b"OggS" + os.urandom(5000), "bad_media"),
    "noise behind ID3": (b"ID3\x04" + os.urandom(5000), "bad_media"),
    "nothing": (b"", "bad_media"),
}


async def test_sounds_that_explode_or_lie(recordings):
    for what, (data, code) in SOUNDS.items():
        assert len(data) < 2**20
        with shared(data) as path, pytest.raises(TriptychError) as caught:
            await recordings.split(path, 30.0, "file")
        assert (what, caught.value.info.code, caught.value.info.param) == (what, code, "file")
    assert recordings.num_crashes == 0
    assert peak_bytes(recordings) < 256 * 2**20


async def test_a_header_that_claims_more_than_there_is(recordings):
    with shared(bombs.wav_header(8000, 1, 2**32 - 1)) as path:
        windows, _ = await recordings.split(path, 30.0, "file")
    assert [window.end for window in windows] == [32 * 1024]  # samples of two bytes


async def test_what_the_first_bytes_tell_is_refused_by_the_proxy(serve):
    """Formats that nobody decodes here, and one kind in another's clothes: encoders never see them."""
    icon = bombs.encoded(Image.new("RGB", (16, 16)), "ICO")
    async with serve() as rig:
        for data in (icon, speech(0.1), b"%PDF-1.7", b"<svg/>", b"GIF", b"\0" * 100):
            with pytest.raises(openai.BadRequestError, match="should be a picture"):
                await rig.chat([image_part(data)])
        await rig.chat([{"type": "image_url", "image_url": {"url": data_url(picture(), "image/jpeg")}}])
        assert len(rig.cluster.encoders[0].received) == 1  # a label is nothing, the bytes are
