"""Recordings in containers: cut into windows like all others, and refused without a word about this process."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from common.errors import TriptychError
from proxy.media.audio import cut, split
from proxy.media.helper_process import shared
from tests.media_files import container, sound_file, tone
from tests.proxy.sample_media import speech

RATE = 16000


def samples_of(data: bytes) -> np.ndarray:
    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


@pytest.mark.parametrize(("muxer", "codec"), [("ipod", "aac"), ("webm", "libopus"), ("adts", "aac"), ("mpeg", "mp2")])
def test_a_long_recording_is_cut_at_the_same_places_as_a_wav_file(muxer, codec):
    wav = speech(70, RATE)
    data = container(samples_of(wav), RATE, muxer, codec)
    with shared(wav) as plain, shared(data) as path:
        expected = split(plain, 30.0, "file").windows
        windows = split(path, 30.0, "file").windows
        assert len(windows) == len(expected) == 3
        for ours, theirs in zip(windows, expected, strict=True):
            assert abs(ours.start_s - theirs.start_s) < 0.15
        whole = np.concatenate([samples_of(cut(path, window, "file")) for window in windows])
    assert abs(len(whole) - windows[-1].end) < 0.002 * windows[-1].sample_rate, "times of WebM are milliseconds"


def test_a_short_recording_is_one_window():
    with shared(container(samples_of(speech(3, RATE)), RATE, "webm", "libopus")) as path:
        ((window,), _) = split(path, 30.0, "file")
    assert abs(window.end_s - 3.0) < 0.1


def test_an_mp3_file_that_breaks_off_ends_where_its_sound_does():
    data = sound_file(tone(60), RATE, "MP3")
    with shared(data[: len(data) // 2]) as path:  # its first frame tells of 60 s
        windows, duration_s = split(path, 30.0, "file")
        heard = [len(samples_of(cut(path, window, "file"))) for window in windows]
    assert 25 < duration_s < 35
    assert heard == [window.end - window.start for window in windows]


@pytest.mark.parametrize("data", [b"\xff\xf1\x50\x80" + bytes(500), b"\0\0\0\x1cftypM4A " + bytes(500), b"no sound"])
def test_errors_name_the_field_and_no_path(data):
    with shared(data) as path, pytest.raises(TriptychError) as caught:
        split(path, 30.0, "file")
    assert caught.value.info.code == "bad_media"
    assert caught.value.info.message.startswith("file ")
    assert "/proc/" not in caught.value.info.message


def test_the_limit_of_seconds_names_itself(monkeypatch):
    monkeypatch.setattr("proxy.media.audio.MAX_AUDIO_S", 5.0)
    data = container(samples_of(speech(8, RATE)), RATE)
    with shared(data) as path, pytest.raises(TriptychError, match="at most 5 s are transcribed") as caught:
        split(path, 30.0, "file")
    assert caught.value.info.code == "item_too_large"
