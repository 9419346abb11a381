"""Real files that are small to send and huge to decode, cut off, or not what they say."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image

from tests.media_files import encoded


def png_bomb(width: int, height: int) -> bytes:
    """A complete PNG of one bit per pixel, all black: some kilobytes for billions of pixels."""
    row = b"\0" + bytes((width + 7) // 8)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row * 64) for _ in range(height // 64)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def text_bomb() -> bytes:
    """A small PNG whose compressed comment unpacks to 256 MiB."""
    picture = encoded(Image.new("RGB", (8, 8)), "PNG")
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(256)) + packer.flush()
    comment = _chunk(b"zTXt", b"Comment\0\0" + packed)
    return picture[:33] + comment + picture[33:]  # behind IHDR


def many_frames(form: str, frames: int) -> bytes:
    """An animation; only its first picture is anybody's business."""
    pictures = [Image.new("P", (512, 512), colour % 256) for colour in range(frames)]
    return encoded(pictures[0], form, save_all=True, append_images=pictures[1:], duration=10, loop=0)


def webp_bomb() -> bytes:
    """An animated WebP whose canvas is the largest there can be, around a picture of one pixel."""
    picture = encoded(Image.new("RGBA", (1, 1)), "WEBP", lossless=True)[12:]
    side = struct.pack("<I", 2**14 - 1)[:3]
    frame = bytes(6) + bytes(3) + bytes(3) + struct.pack("<I", 10)[:3] + b"\0" + picture
    chunks = b"VP8X" + struct.pack("<I", 10) + b"\x12\0\0\0" + side + side
    chunks += b"ANIM" + struct.pack("<I", 6) + bytes(6)
    chunks += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def jpeg_bomb() -> bytes:
    """A JPEG whose header says 65,500 pixels in both directions."""
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


def silence(seconds: int, rate: int = 1000, form: str = "FLAC", channels: int = 1) -> bytes:
    """Hours of nothing in some kilobytes."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, channels, format=form, subtype="PCM_16") as file:
        second = np.zeros((rate, channels), np.int16)
        for _ in range(seconds):
            file.write(second)
    return out.getvalue()


def of_unknown_length(flac: bytes) -> bytes:
    """The same FLAC whose header does not tell how long it is, as a recorder writes it that streams."""
    data = bytearray(flac)
    assert data[:4] == b"fLaC"
    data[21] &= 0xF0  # the total is 36 bits, from the middle of this byte on
    data[22:26] = bytes(4)
    return bytes(data)


def wav_header(rate: int, channels: int, num_bytes: int) -> bytes:
    """A WAV file that claims so much, with a few samples in it."""
    width = 2 * channels
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * width % 2**32, width % 2**16, 16)
    return (
        b"RIFF"
        + struct.pack("<I", num_bytes)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + (b"data" + struct.pack("<I", num_bytes) + bytes(64 * 1024))
    )
