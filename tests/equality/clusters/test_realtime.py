"""Live audio through the openai package and real processes: what is told is what an upload gives."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr

from tests.equality.media import recording
from tests.equality.served import Served, serve
from tests.media_files import sound_file
from tests.tiny_models import make_whisper

pytestmark = pytest.mark.cluster
RATE = 24_000
ITEM = "conversation.item.input_audio_transcription"
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


def live(name: str) -> bytes:
    """A recording of tests/data as a microphone sends it."""
    _, samples = recording(name)
    return (soxr.resample(samples, 16_000, RATE) * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes()


async def speak(connection: Any, pcm: bytes) -> None:
    for begin in range(0, len(pcm), RATE // 5):
        await connection.input_audio_buffer.append(audio=base64.b64encode(pcm[begin : begin + RATE // 5]).decode())


async def heard(connection: Any) -> tuple[str, str]:
    """The transcript of the next segment, and what its deltas have told."""
    told = ""
    async for event in connection:
        assert event.type != "error", event
        if event.type == f"{ITEM}.delta":
            told += event.delta
        elif event.type == f"{ITEM}.completed":
            return event.transcript, told
    raise AssertionError("the session has ended")


async def uploaded(served: Served, pcm: bytes) -> str:
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 2**15
    file = ("live.wav", sound_file(samples[:, None], RATE, subtype="PCM_16"))
    async with served.client() as client:
        return (await client.audio.transcriptions.create(model=served.info.name, file=file)).text


async def test_a_session_of_the_openai_package_gives_the_text_of_an_upload(tmp_path: Path, broker_url: str) -> None:
    folder = make_whisper(tmp_path / "tiny-whisper", max_target_positions=24)
    pcm = live("amiable.wav")
    with serve(folder, broker_url, "realtime") as served:
        expected = await uploaded(served, pcm)
        async with served.client() as client, client.realtime.connect(model=served.info.name) as connection:
            await connection.session.update(session=MANUAL)
            for _ in range(2):
                await speak(connection, pcm)
                await connection.input_audio_buffer.commit()
                transcript, told = await heard(connection)
                assert transcript == expected
                assert told
        await served.wait_until_nothing_is_held()


@pytest.mark.weights
async def test_spoken_turns_are_found_and_read(whisper_tiny_en: Path, broker_url: str) -> None:
    pause = bytes(2 * RATE)
    spoken = [live("dashwood.flac"), live("amiable.wav")]
    with serve(whisper_tiny_en, broker_url, "realtime-words") as served:
        async with served.client() as client, client.realtime.connect(model=served.info.name) as connection:
            await speak(connection, pause + spoken[0] + pause + spoken[1] + pause)
            turns = [await heard(connection) for _ in range(2)]
        assert "leisure to consider" in turns[0][0]
        assert "amiable" in turns[1][0]
        for transcript, told in turns:
            assert told.split()[-1] == transcript.split()[-1]
        await served.wait_until_nothing_is_held()
