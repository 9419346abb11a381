"""`python -m tools.bench.realtime`: how soon after a word is spoken its text comes, and the whole text after a commit.

Recordings are sent as a microphone sends them: 100 ms of audio each 100 ms, with a commit at each recording's end. An
upload of the same audio tells when each word ends (`timestamp_granularities[]=word`), and the text that is expected.
"""

from __future__ import annotations

import asyncio
import base64
import difflib
import io
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import httpx
import numpy as np
import soundfile
import soxr
import typer
from websockets.asyncio.client import ClientConnection, connect

from tools.bench.report import markdown

if TYPE_CHECKING:
    import numpy.typing as npt

RATE: Final = 24_000
PIECE_S: Final = 0.1
_MANUAL: Final = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
_EVENT: Final = "conversation.item.input_audio_transcription"
_ROOT: Final = Path(__file__).resolve().parents[2]
RECORDINGS: Final = [_ROOT / "tests" / "data" / name for name in ("dashwood.flac", "amiable.wav")]


@dataclass
class Heard:
    """Times in seconds: from the end of a word to its delta, and from the end of a recording to its whole text."""

    words_s: list[float] = field(default_factory=list)
    completed_s: list[float] = field(default_factory=list)
    num_words: int = 0
    num_early: int = 0
    num_wrong: int = 0


def realtime(
    server: Annotated[str, typer.Argument(help="Address of a server, such as http://127.0.0.1:8000.")],
    recordings: Annotated[list[Path] | None, typer.Argument(help="Files; those of tests/data by default.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="How often each recording is spoken.")] = 5,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at once, each beginning at another moment.")] = 1,
) -> None:
    """Measure delays at the pace of speech and print a row of a table."""
    files = [_samples(path) for path in recordings or RECORDINGS]
    timed = [_words(server, samples) for samples in files]
    heard = Heard()

    async def speak_all() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(_session(server, files * turns, timed * turns, heard, number * 0.37))

    asyncio.run(speak_all())
    cells = [str(sessions), f"{heard.num_words}", f"{heard.num_early}", f"{heard.num_wrong}"]
    cells += [_percentiles_ms(times) for times in (heard.words_s, heard.completed_s)]
    head = ["sessions", "words", "told before the end", "other than of the upload"]
    head += ["delta after its words, p50 / p90, ms", "completed after the commit, p50 / p90, ms"]
    print(markdown(head, [cells]))


def _percentiles_ms(times_s: Sequence[float]) -> str:
    """Return the 50th and 90th percentile in ms; of no times, a dash."""
    return " / ".join(f"{1000 * float(np.percentile(times_s, share)):.0f}" for share in (50, 90)) if times_s else "–"


def _samples(path: Path) -> npt.NDArray[np.float32]:
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    resampled: npt.NDArray[np.float32] = soxr.resample(samples.mean(axis=1), rate, RATE)
    return resampled


def _words(server: str, samples: npt.NDArray[np.float32]) -> list[tuple[str, float]]:
    """Return the words of an upload, and when each ends."""
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV", subtype="PCM_16")
    form = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    files = {"file": ("speech.wav", out.getvalue())}
    url = f"{server}/v1/audio/transcriptions"
    answer = httpx.post(url, data=form, files=files, timeout=120, trust_env=False).raise_for_status().json()
    return [(_plain(word["word"]), word["end"]) for word in answer["words"]]


async def _session(
    server: str, files: Sequence[npt.NDArray[np.float32]], timed: Sequence[Any], heard: Heard, wait_s: float
) -> None:
    await asyncio.sleep(wait_s)
    async with connect(server.replace("http", "ws", 1) + "/v1/realtime", proxy=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "session": _MANUAL}))
        for samples, words in zip(files, timed, strict=True):
            end_s = len(samples) / RATE
            speaking = asyncio.create_task(_speak(socket, samples))
            told: list[tuple[str, float]] = []
            begin_s = time.monotonic()
            while (event := json.loads(await socket.recv()))["type"] != f"{_EVENT}.completed":
                if event["type"] == f"{_EVENT}.delta":
                    told += [(_plain(word), time.monotonic() - begin_s) for word in event["delta"].split()]
            heard.completed_s.append(time.monotonic() - begin_s - end_s)
            final = [_plain(word) for word in event["transcript"].split()]
            _count(heard, told, words, final, end_s)
            await speaking


def _count(
    heard: Heard, told: list[tuple[str, float]], words: list[tuple[str, float]], final: list[str], end_s: float
) -> None:
    spoken = [word for word, _ in words]
    same = difflib.SequenceMatcher(None, [word for word, _ in told], spoken, autojunk=False)
    for block in same.get_matching_blocks():
        for place in range(block.size):
            heard.words_s.append(told[block.a + place][1] - words[block.b + place][1])
    heard.num_early += sum(at_s < end_s for _, at_s in told)
    heard.num_words += len(words)
    alike = difflib.SequenceMatcher(None, final, spoken, autojunk=False).get_matching_blocks()
    heard.num_wrong += max(len(final), len(spoken)) - sum(block.size for block in alike)


async def _speak(socket: ClientConnection, samples: npt.NDArray[np.float32]) -> None:
    pcm = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    begin_s, size = time.monotonic(), 2 * round(PIECE_S * RATE)
    for number, begin in enumerate(range(0, len(pcm), size), 1):
        await asyncio.sleep(max(0.0, begin_s + number * PIECE_S - time.monotonic()))
        audio = base64.b64encode(pcm[begin : begin + size]).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))


def _plain(word: str) -> str:
    return re.sub(r"\W", "", word).casefold()


if __name__ == "__main__":
    typer.run(realtime)
