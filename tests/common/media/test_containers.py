"""Sound out of the containers that phones and browsers record."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest

from common.errors import TriptychError
from common.media.containers import FORMATS, HEAD_BYTES, Sound, demuxer, opened
from tests.media_files import container, tone

RATE = 48000
CODECS = {
    "mp4": "aac",
    "ipod": "aac",
    "mov": "aac",
    "webm": "libopus",
    "matroska": "libopus",
    "adts": "aac",
    "mpeg": "mp2",
}


def beeps() -> np.ndarray:
    """Four seconds, each with another pitch."""
    times = np.arange(4 * RATE) / RATE
    return (0.4 * np.sin(2 * np.pi * (300 + 200 * np.floor(times)) * times)).astype(np.float32)


def read(data: bytes, start_s: float = 0.0) -> np.ndarray:
    with opened(data, "the sound") as file:
        return np.concatenate(list(Sound(file, "the sound").blocks(start_s)))[:, 0]


def pitch(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * RATE / len(samples))


@pytest.mark.parametrize(("muxer", "codec"), CODECS.items())
def test_every_container_gives_its_sound_from_any_second_on(muxer, codec):
    data = container(beeps(), RATE, muxer, codec)
    whole = read(data)
    assert abs(len(whole) - 4 * RATE) < 0.06 * RATE
    for second in range(4):
        assert pitch(whole[round((second + 0.2) * RATE) :][: RATE // 2]) == pytest.approx(300 + 200 * second, abs=5)
    late = read(data, 2.0)
    assert abs(len(late) - (len(whole) - 2 * RATE)) <= RATE // 1000
    assert pitch(late[RATE // 5 :][: RATE // 2]) == pytest.approx(700, abs=5)


def test_a_browsers_stream_without_length_is_read_to_its_end():
    data = container(beeps(), RATE, "webm", "libopus", live="1")
    with opened(data, "the sound") as file:
        assert Sound(file, "the sound").duration_s is None
    assert len(read(data)) == 4 * RATE


def test_a_pause_of_the_recorder_is_silence():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream = file.add_stream("libopus", rate=RATE, layout="mono")
        for start_s in (0.0, 3.0):
            for number in range(50):
                part = tone(0.02, RATE)[:, 0]
                frame = av.AudioFrame.from_ndarray(part[None], format="flt", layout="mono")
                frame.sample_rate, frame.pts = RATE, round((start_s + 0.02 * number) * RATE)
                frame.time_base = Fraction(1, RATE)
                file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    sound = read(buffer.getvalue())
    assert abs(len(sound) - 4 * RATE) < 0.05 * RATE
    assert not sound[round(1.2 * RATE) : round(2.8 * RATE)].any()


def test_still_images_and_other_formats_are_no_containers():
    assert demuxer(b"\0\0\0\x1cftypavif\0\0\0\0") is demuxer(b"\0\0\0\x1cftypheic\0\0\0\0") is None
    assert demuxer(b"\xff\xfb\x90\0") is None, "MP3 is libsndfile's"
    assert demuxer(b"RIFF\0\0\0\0WAVE") is demuxer(b"") is None
    with pytest.raises(TriptychError, match=FORMATS), opened(b"#EXTM3U\nfile:///etc/passwd\n", "the sound"):
        pass


def test_damage_is_told_without_any_path(tmp_path):
    good = container(tone(1.0, RATE)[:, 0], RATE)
    for number, data in enumerate((good[: len(good) // 2], good[:HEAD_BYTES], b"\xff\xf1" + bytes(999))):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(TriptychError) as caught, opened(str(path), "file") as file:
            list(Sound(file, "file").blocks())
        assert caught.value.info.code == "bad_media"
        assert str(tmp_path) not in caught.value.info.message
        assert caught.value.info.message.startswith("file ")


def test_too_many_channels_are_refused(monkeypatch):
    monkeypatch.setattr("common.media.containers.MAX_CHANNELS", 0)
    with pytest.raises(TriptychError, match="1 channels; at most 0"):
        read(container(tone(0.5, RATE)[:, 0], RATE))
