"""Untrusted media: what is good is decoded as a person sees and hears it, what is bad is named."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.errors import TriptychError
from common.media import containers
from engine.media.audio import decode_audio
from engine.media.image import FORMATS, MAX_PIXELS, decode_image
from engine.media.log_mel import LogMel, LogMelSettings
from tests.media_files import encoded, noise, sound_file, tone


def refused(function: Any, *arguments: Any) -> str:
    with pytest.raises(TriptychError) as caught:
        function(*arguments)
    assert caught.value.info.code == "bad_media"
    return caught.value.info.message


def outcome(function: Any, *arguments: Any) -> Any:
    """The result, or the code of the error; any other exception fails the test."""
    try:
        return function(*arguments)
    except TriptychError as error:
        return error.info.code


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG that claims a size: 45 bytes that would decode to any number of pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))


class TestPictures:
    @pytest.mark.parametrize("format", FORMATS)
    def test_every_format_is_decoded(self, format: str) -> None:
        image = decode_image(encoded(noise(30, 20), format))
        assert (image.mode, image.size) == ("RGB", (30, 20))

    def test_lossless_pixels_are_kept(self) -> None:
        image = noise(30, 20)
        assert np.array_equal(np.asarray(decode_image(encoded(image))), np.asarray(image))

    def test_exif_rotation_is_applied(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # turn a quarter clockwise
        image = noise(30, 20)
        turned = decode_image(encoded(image, exif=exif.tobytes()))
        assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))

    def test_damaged_exif_is_ignored(self) -> None:
        assert decode_image(encoded(noise(30, 20), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff")).size == (30, 20)

    @pytest.mark.parametrize("mode", ["RGBA", "LA"])
    def test_transparency_is_laid_on_white(self, mode: str) -> None:
        image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
        image.putpixel((1, 1), (0, 0, 0, 255))
        pixels = np.asarray(decode_image(encoded(image.convert(mode))))
        assert pixels[0, 0].tolist() == [255, 255, 255]
        assert pixels[1, 1].tolist() == [0, 0, 0]

    def test_palettes_are_resolved_transparent_entries_too(self) -> None:
        image = Image.new("P", (4, 4), 1)
        image.putpalette([10, 20, 30, 40, 50, 60])
        image.putpixel((0, 0), 0)
        pixels = np.asarray(decode_image(encoded(image, transparency=0)))
        assert pixels[0, 0].tolist() == [255, 255, 255]
        assert pixels[1, 1].tolist() == [40, 50, 60]

    def test_sixteen_bits_per_pixel_are_scaled(self) -> None:
        image = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], dtype=np.uint16))
        assert np.asarray(decode_image(encoded(image)))[0, :, 0].tolist() == [0, 128, 255]

    def test_decompression_bombs_are_refused_by_their_header(self) -> None:
        for width in (10_000, 60_000):
            message = refused(decode_image, png_header(width, 50_000))
            assert str(MAX_PIXELS) in message
            assert "scale it down" in message

    @pytest.mark.parametrize("media", [b"", b"not a picture", b"<svg/>", b"%PDF-1.7", bytes(1000)])
    def test_other_bytes_are_no_picture(self, media: bytes) -> None:
        assert f"({len(media)} bytes) is not in one of the formats JPEG, PNG" in refused(decode_image, media)

    def test_a_format_outside_the_list_is_refused(self) -> None:
        assert "is not in one of the formats" in refused(decode_image, encoded(noise(8, 8), "ICO"))

    @pytest.mark.parametrize("format", FORMATS)
    def test_a_picture_cut_off_anywhere_is_refused_or_whole(self, format: str) -> None:
        media = encoded(noise(60, 40), format)
        sizes = range(0, len(media) - 1, max(1, len(media) // 20))
        outcomes = [outcome(decode_image, media[:size]) for size in sizes]
        assert all(result == "bad_media" or result.size == (60, 40) for result in outcomes)
        assert outcomes.count("bad_media") > 10

    def test_damaged_pictures_raise_nothing_else(self) -> None:
        rng = np.random.default_rng(0)
        for format in FORMATS:
            media = bytearray(encoded(noise(20, 20), format))
            for _ in range(30):
                damaged = bytearray(media)
                for place in rng.integers(0, len(media), 8):
                    damaged[place] = rng.integers(256)
                result = outcome(decode_image, bytes(damaged))
                assert result == "bad_media" or result.mode == "RGB"


class TestSounds:
    @pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
    def test_every_format_is_decoded(self, format: str) -> None:
        samples = decode_audio(sound_file(tone(1.0), format=format), 16000, 30)
        assert samples.dtype == np.float32
        assert len(samples) == pytest.approx(16000, rel=0.1)
        assert np.abs(samples).max() == pytest.approx(0.1, rel=0.2)

    def test_samples_at_the_right_rate_are_kept(self) -> None:
        samples = tone(0.5)
        decoded = decode_audio(sound_file(samples, subtype="FLOAT"), 16000, 30)
        assert np.array_equal(decoded, samples[:, 0])

    def test_channels_are_averaged(self) -> None:
        stereo = tone(0.5, channels=2)
        decoded = decode_audio(sound_file(stereo, subtype="FLOAT"), 16000, 30)
        assert np.allclose(decoded, stereo.mean(axis=1))

    @pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
    def test_other_rates_are_resampled(self, rate: int) -> None:
        decoded = decode_audio(sound_file(tone(1.0, rate), rate), 16000, 30)
        assert len(decoded) == 16000
        middle = slice(4000, 12000)
        assert np.allclose(decoded[middle], tone(1.0)[middle, 0], atol=2e-3)

    def test_a_clip_of_exactly_the_limit_is_taken_and_one_sample_more_is_not(self) -> None:
        assert len(decode_audio(sound_file(tone(2.0)), 16000, 2)) == 32000
        message = refused(decode_audio, sound_file(tone(2.5)), 16000, 2)
        assert message == "the clip is 2.50 s long; at most 2 s are accepted"
        refused(decode_audio, sound_file(np.vstack([tone(2.0), tone(1 / 16000)])), 16000, 2)

    @pytest.mark.parametrize("media", [b"", b"RIFF", b"not a sound", bytes(1000)])
    def test_other_bytes_are_no_sound(self, media: bytes) -> None:
        message = refused(decode_audio, media, 16000, 30)
        accepted = f"WAV, MP3, FLAC, Ogg, AIFF, {containers.FORMATS} are accepted"
        assert f"({len(media)} bytes) cannot be decoded; {accepted}" in message

    def test_an_empty_sound_is_refused(self) -> None:
        assert refused(decode_audio, sound_file(tone(0)), 16000, 30) == "the sound has no samples"

    @pytest.mark.parametrize("sample", [np.nan, -np.inf, 1e18, -3e38])
    def test_samples_that_no_spectrum_has_a_number_for_are_refused(self, sample: float) -> None:
        samples = tone(0.1)
        samples[7] = sample
        assert "not finite, or beyond 1e+15" in refused(decode_audio, sound_file(samples, subtype="FLOAT"), 16000, 30)

    def test_the_loudest_sound_has_a_spectrum(self) -> None:
        samples = decode_audio(sound_file(tone(0.1) * 9e14, subtype="FLOAT"), 16000, 30)
        assert np.isfinite(LogMel(LogMelSettings())(samples)).all()

    def test_absurd_headers_are_refused(self) -> None:
        assert "sampling rate of 10 Hz" in refused(decode_audio, sound_file(tone(1, 10), 10), 16000, 30)
        assert "64 channels" in refused(decode_audio, sound_file(tone(0.01, channels=64)), 16000, 30)

    def test_damaged_sounds_raise_nothing_else(self) -> None:
        rng = np.random.default_rng(0)
        for format in ("WAV", "FLAC", "OGG", "MP3"):
            media = bytearray(sound_file(tone(0.2), format=format))
            for _ in range(20):
                damaged = bytearray(media)
                for place in rng.integers(0, len(media), 8):
                    damaged[place] = rng.integers(256)
                result = outcome(decode_audio, bytes(damaged), 16000, 30)
                assert isinstance(result, np.ndarray) or result == "bad_media"
