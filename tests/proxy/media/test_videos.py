"""Videos in requests: cut into pieces for encoders, from every kind of URL; and refused by the name of the limit."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import openai
import pytest

from common.media.videos import VideoPiece, read_piece
from common.messages import Encode, Generate
from tests.proxy.media.test_media import _ok, web_server
from tests.proxy.sample_media import picture
from tests.video_files import moving, video_file

FIELD = "messages[0].content[0].video_url.url"


def part(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def data_url(media: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(media).decode()


def pieces_in(rig: Any) -> list[VideoPiece]:
    """What the encoders were sent, in the order of the prompt."""
    sent = [message for encoder in rig.cluster.encoders for message in encoder.of(Encode)]
    assert {message.kind for message in sent} == {"video"}
    return [read_piece(message.media) for message in sorted(sent, key=lambda message: message.input_id)]


@pytest.fixture(scope="module")
def clip() -> bytes:
    """Four seconds, twice cut by a key frame."""
    return video_file(moving(40), 10, codec="libx264", g=10)


@pytest.mark.parametrize("scheme", ["data", "http", "file"])
async def test_a_video_is_cut_into_pieces_for_the_encoders(serve, scheme: str, clip: bytes, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip)
    async with (
        web_server(lambda path: _ok(clip)) as server,
        serve(allow_private_media_urls=True, allowed_media_folder=tmp_path) as rig,
    ):
        urls = {"data": data_url(clip), "http": f"{server}/clip", "file": f"file://{tmp_path}/clip.mp4"}
        await rig.chat([part(urls[scheme]), {"type": "text", "text": "What happens?"}])
        pieces = pieces_in(rig)
        [generate] = [message for worker in rig.cluster.workers for message in worker.of(Generate)]
    assert len(pieces) > 1
    assert [number for piece in pieces for number in piece.frames] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    places = [slot.prompt_index for slot in generate.inputs]
    assert places == list(range(places[0], places[0] + len(pieces))), "the pieces follow each other in the prompt"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_video_seconds": 2}, r"lasts 4 s, at most 2 s are accepted \(max_video_seconds\)"),
        ({"max_video_frames": 4}, r"would see 8 frames .*\(max_video_frames\)"),
        ({"max_video_pixels": 1000}, r"frames of 160 x 120 pixels, at most 1000 .*\(max_video_pixels\)"),
        ({"max_video_bytes": 1000}, r"at most 1000 are allowed \(--max-video-bytes\)"),
    ],
)
async def test_a_limit_names_itself(serve, settings: dict[str, Any], message: str, clip: bytes) -> None:
    async with serve(**settings) as rig:
        with pytest.raises(openai.APIStatusError, match=message) as caught:
            await rig.chat([part(data_url(clip))])
        assert caught.value.status_code == 413
        assert caught.value.param == FIELD


async def test_what_is_no_video_is_refused_by_the_fields_name(serve, clip: bytes) -> None:
    async with serve() as rig:
        for media, message in (
            (picture(), "should be a video .* it looks like"),
            (b"junk" * 20, "begins with"),
            (clip[: len(clip) // 2], "cannot be decoded"),
        ):
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                await rig.chat([part(data_url(media))])
            assert caught.value.param == FIELD
        assert (await rig.chat("Are you well?")).choices


async def test_a_model_without_videos_says_what_it_takes(serve, text_model, clip: bytes) -> None:
    async with serve(text_model.folder) as rig:
        with pytest.raises(openai.BadRequestError, match=f"{rig.model} takes text only, not video input"):
            await rig.chat([part(data_url(clip))])
