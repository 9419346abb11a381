"""Videos: what is sampled and how large, pieces that decode alone, and what is refused."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from common.errors import TriptychError
from common.media import videos
from common.media.video_rules import VideoRules, read_rules
from common.media.videos import VideoLimits, VideoPiece, cut, read_piece
from common.model_info import load_model_info
from engine.media.video import decode_frames
from tests.media_files import container, encoded, noise
from tests.video_files import all_frames, moving, video_file

RULES = VideoRules(min_pixels=28 * 28, max_pixels=196 * 196, image_pixels=196 * 196)
CODECS: list[tuple[str, str, dict[str, Any]]] = [
    ("mpeg4", "mp4", {}),
    ("libx264", "mov", {"bf": 3, "g": 9}),
    ("libx264", "matroska", {"x264-params": "open-gop=1:keyint=8:min-keyint=8:bframes=3"}),
    ("libvpx", "webm", {"auto-alt-ref": 1, "lag-in-frames": 16}),
    ("libvpx-vp9", "webm", {}),
    ("mpeg2video", "mpeg", {"bf": 2}),
    ("png", "mov", {"pix_fmt": "rgb24"}),
]


def pieces_of(media: bytes, rules: VideoRules = RULES, **limits: Any) -> list[VideoPiece]:
    return [read_piece(piece) for piece in cut(media, rules, VideoLimits(**limits), "the video")]


@pytest.mark.parametrize(("codec", "muxer", "options"), CODECS, ids=lambda value: str(value))
def test_pieces_decode_alone_to_the_frames_of_the_whole(codec: str, muxer: str, options: dict[str, Any]) -> None:
    rate = 25 if muxer == "mpeg" else 10
    media = video_file(moving(48), rate, codec=codec, muxer=muxer, **options)
    whole = all_frames(media)
    pieces = pieces_of(media, replace(RULES, fps=rate / 5))
    assert len(whole) == 48
    assert len(pieces) > 1
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    for piece in pieces:
        for number, image in zip(piece.frames, decode_frames(piece, Image.Resampling.BICUBIC), strict=True):
            expected = Image.fromarray(whole[number]).resize(piece.size, Image.Resampling.BICUBIC)
            assert np.array_equal(np.asarray(image), np.asarray(expected)), number


@pytest.mark.parametrize(
    ("group", "pairs", "repeated"),
    [
        (10, [5, 5, 5, 5], 0),  # one pair more than fit, to a key frame
        (6, [3, 3, 3, 3, 3, 5], 0),  # one pair less; five at the end are not worth a cut
        (14, [4, 3, 4, 3, 4, 2], 24),  # the second half of a group needs the first
    ],
)
def test_pieces_end_at_the_key_frame_nearest_to_their_size(
    group: int, pairs: list[int], repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = replace(RULES, fps=10, image_pixels=10**6)
    tokens = rules.tokens_of(rules.frame_size(160, 120, 40))
    monkeypatch.setattr(videos, "PIECE_TOKENS", 4 * tokens)
    pieces = pieces_of(video_file(moving(40), 10, codec="libx264", g=group, bf=0), rules)
    assert [len(piece.frames) // 2 for piece in pieces] == pairs
    assert sum(len(piece.packets) for piece in pieces) == 40 + repeated


def test_an_odd_number_of_frames_ends_with_a_repeated_one() -> None:
    rules = replace(RULES, per_video=True)
    frames = [number for piece in pieces_of(video_file(moving(37), 10), rules) for number in piece.frames]
    assert frames == [0, 6, 12, 18, 24, 30, 36, 36]


def test_frames_of_a_varying_rate_are_counted() -> None:
    times = [0, 1, 2, 3, 10, 20, 30, 31, 32, 49]
    media = video_file(moving(10), 10, muxer="matroska", times=times)
    [piece] = pieces_of(media, replace(RULES, num_frames=4, fps=None, image_pixels=10**6))
    assert piece.frames == [0, 2, 5, 7]
    whole, images = all_frames(media), list(decode_frames(piece, Image.Resampling.NEAREST))
    for number, image in zip(piece.frames, images, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(Image.fromarray(whole[number]).resize(piece.size, 0)))


@pytest.mark.parametrize(("declared", "times"), [(50, range(0, 1000, 10)), (1000, range(0, 20_000, 200))], ids=str)
def test_a_rate_in_the_header_that_frames_do_not_keep_is_their_mean(declared: int, times: range) -> None:
    media = video_file(moving(100, 32, 32), declared, muxer="matroska", times=list(times))
    pieces = pieces_of(media, replace(RULES, per_video=True, image_pixels=10**6))
    assert sum(len(piece.frames) for piece in pieces) == 40, "two a second, of twenty"
    assert pieces[-1].seconds[-1] == pytest.approx(19.5, abs=0.5)


def test_a_turned_video_is_seen_upright() -> None:
    frames = np.zeros((4, 96, 192, 3), np.uint8)
    frames[:, :, 96:] = 255  # the right half is white
    [piece] = pieces_of(video_file(frames, 2, rotation=90))
    width, height = piece.size
    image = np.asarray(next(decode_frames(piece, Image.Resampling.BICUBIC)))
    assert height > 2 * width
    assert image[: height // 3].mean() > 200, "turned counter-clockwise, the right half is on top"
    assert image[-height // 3 :].mean() < 50


@pytest.mark.parametrize(
    ("limits", "code", "message"),
    [
        ({"max_video_seconds": 3}, "item_too_large", r"lasts 5 s, at most 3 s are accepted \(max_video_seconds\)"),
        ({"max_video_frames": 8}, "item_too_large", r"would see 10 frames .* at most 8 .* \(max_video_frames\)"),
        ({"max_video_pixels": 160 * 119}, "item_too_large", r"160 x 120 pixels, at most 19040 .* \(max_video_pixels\)"),
        ({"max_tokens": 120}, "context_length_exceeded", "makes 120 tokens of 10 frames of 168 x 112 pixels"),
    ],
)
def test_what_is_too_large_is_refused_by_the_limits_name(limits: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(TriptychError, match=message) as caught:
        pieces_of(video_file(moving(50), 10), **limits)
    assert caught.value.info.code == code


def test_what_is_no_video_is_refused() -> None:
    whole = video_file(moving(50), 10, muxer="mp4")
    moved = moov_first(whole)
    for media, message in (
        (encoded(noise(20, 20)), "no container that can be read"),
        (container(np.zeros(9600, np.float32)), "has no video stream"),
        (whole[: len(whole) // 2], "cannot be decoded"),
        (moved[: len(moved) * 2 // 3], "is cut off: its header announces 50 frames"),
        (video_file(moving(4, 4200, 16), 10), "one side is more than 200 times the other"),
    ):
        with pytest.raises(TriptychError, match=message) as caught:
            pieces_of(media)
        assert caught.value.info.code == "bad_media"


def test_a_video_trimmed_by_an_edit_list_is_what_is_left_of_it() -> None:
    media = bytearray(video_file(moving(50), 10, g=10))
    at = media.index(b"elst") + 12
    media[at : at + 4] = (2000).to_bytes(4, "big")  # of five seconds, in milliseconds
    frames = [number for piece in pieces_of(bytes(media)) for number in piece.frames]
    assert frames == [0, 5, 10, 15]


def test_a_piece_that_lacks_packets_is_refused() -> None:
    [piece, *_] = pieces_of(video_file(moving(20), 10, codec="libx264"))
    for broken, message in (
        (VideoPiece(**{**vars_of(piece), "packets": []}), "frame 0 of the video"),
        (VideoPiece(**{**vars_of(piece), "codec": "no such"}), "cannot be decoded"),
    ):
        with pytest.raises(TriptychError, match=message):
            list(decode_frames(broken, 3))
    with pytest.raises(TriptychError, match="not a piece"):
        read_piece(b"junk")


def test_sizes_and_samples_are_those_of_transformers() -> None:
    """Computed once with transformers 5.24 and torchvision, at two frames per second and with capped pixels."""
    second, third = (
        VideoRules(),
        VideoRules(patch_size=16, min_pixels=128 * 32**2, max_pixels=768 * 32**2, max_video_tokens=768, per_video=True),
    )
    assert second.sample(75, 10.0)[:9] == [0, 5, 10, 16, 21, 26, 32, 37, 42]
    assert second.sample(5, 25.0) == [0, 1, 2, 3]
    assert third.sample(50, 10.0) == [0, 5, 11, 16, 22, 27, 33, 38, 44, 49]
    assert len(second.sample(30_000, 29.97)) == len(third.sample(30_000, 29.97)) == 768
    assert second.frame_size(1920, 1080, 768) == (644, 336)
    assert third.frame_size(1920, 1080, 60) == (480, 256)
    assert second.sample(1, 25.0) == third.sample(1, 25.0) == [0]


def vars_of(piece: VideoPiece) -> dict[str, Any]:
    return {name: getattr(piece, name) for name in piece.__struct_fields__}


def moov_first(media: bytes) -> bytes:
    """The same MP4 file with its header before the frames, as for streaming."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(media)) as source, av.open(buffer, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = buffer.getvalue()
    place = data.index(b"moov") - 4
    header, frames = bytearray(data[place:]), data[:place]
    # Offsets of the chunks (stco) move by the length of the header, which now comes before the frames' box.
    at = header.index(b"stco") + 12
    count = int.from_bytes(header[at - 4 : at], "big")
    for index in range(count):
        where = slice(at + 4 * index, at + 4 * index + 4)
        header[where] = (int.from_bytes(header[where], "big") + len(header)).to_bytes(4, "big")
    first = frames.index(b"mdat") - 4
    return frames[:first] + bytes(header) + frames[first:]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_processor_config_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "processor_config.json").write_text(content)
    with pytest.raises(TriptychError, match=r"processor_config\.json") as caught:
        read_rules(replace(load_model_info("signpost"), folder=tmp_path))
    assert caught.value.info.code == "model_not_found"
