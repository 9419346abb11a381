"""`python -m tools.bench.recordings`: words and their times beside faster-whisper's, of the same checkpoint.

Wants faster-whisper, which may be in an environment of its own: `pip install faster-whisper httpx typer`. Both read
greedily, faster-whisper in float32.
"""

from __future__ import annotations

import difflib
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

_NUMBERS = dict(enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]))


@dataclass
class Heard:
    """What a system makes of a recording: words as `_words` makes them, each with its begin and end in seconds."""

    words: list[tuple[str, float, float]]
    text: list[str]


def recordings(
    server: Annotated[str, typer.Argument(help="Address of a server, such as http://127.0.0.1:8000.")],
    model: Annotated[Path, typer.Argument(help="Folder of the same checkpoint in CTranslate2's form.")],
    folder: Annotated[Path, typer.Argument(help="Recordings (*.wav), with texts in *transcription* or *.txt.")],
) -> None:
    """Print word errors of both, and how far the times of equal words are apart."""
    from faster_whisper import WhisperModel  # type: ignore[import-not-found,unused-ignore]

    other, texts = WhisperModel(str(model), device="cpu", compute_type="float32"), _transcripts(folder)
    num_words = errors = errors_other = equal = 0
    apart_ms: list[float] = []
    paths = [path for path in sorted(folder.rglob("*.wav")) if path.stem in texts]
    for path in paths:
        ours, theirs, text = _ours(server, path), _theirs(other, path), _words(texts[path.stem])
        num_words += len(text)
        errors += _distance(text, ours.text)
        errors_other += _distance(text, theirs.text)
        equal += ours.text == theirs.text
        matcher = difflib.SequenceMatcher(
            None, [word for word, *_ in ours.words], [word for word, *_ in theirs.words], autojunk=False
        )
        for block in matcher.get_matching_blocks():
            pairs = zip(ours.words[block.a :][: block.size], theirs.words[block.b :][: block.size], strict=True)
            for (_, begin, end), (_, their_begin, their_end) in pairs:
                apart_ms += [1000 * abs(begin - their_begin), 1000 * abs(end - their_end)]
    apart_ms.sort()
    print(f"{len(paths)} recordings, {num_words} words; {equal} texts are equal")
    rates = [f"{count} ({count / num_words:.1%})" for count in (errors, errors_other)]
    print(f"word errors: {rates[0]}, faster-whisper {rates[1]}")
    print(
        f"begins and ends of {len(apart_ms) // 2} equal words, ms apart: median {statistics.median(apart_ms):.0f}, "
        f"90 % within {apart_ms[int(0.9 * len(apart_ms))]:.0f}, at most {apart_ms[-1]:.0f}"
    )


def _transcripts(folder: Path) -> dict[str, str]:
    """Read lines `TEXT (NAME)` in *transcription*, and `NAME: TEXT` in *.txt."""
    found: dict[str, str] = {}
    for path in folder.rglob("*transcription*"):
        lines = re.findall(r"^(.*?)\s*\((\S+)\)\s*$", path.read_text(), re.MULTILINE)
        found |= {name: re.sub(r"</?s>", "", text) for text, name in lines}
    for path in folder.rglob("*.txt"):
        found |= dict(re.findall(r"^(\S+): ([^\[\n]+)$", path.read_text(), re.MULTILINE))  # no text: [a tone]
    return found


def _words(text: str) -> list[str]:
    """Return words in small letters: numbers up to ten are spelled, hyphens are spaces, `Mr` is `mister`."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return [_NUMBERS.get(int(word), word) if word.isdigit() else "mister" if word == "mr" else word for word in words]


def _heard(text: str, words: list[tuple[str, float, float]]) -> Heard:
    return Heard([(" ".join(_words(word)), begin, end) for word, begin, end in words], _words(text))


def _ours(server: str, path: Path) -> Heard:
    form = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    files = {"file": (path.name, path.read_bytes())}
    url = f"{server}/v1/audio/transcriptions"
    answer = httpx.post(url, data=form, files=files, timeout=600, trust_env=False).raise_for_status().json()
    return _heard(answer["text"], [(word["word"], word["start"], word["end"]) for word in answer["words"]])


def _theirs(model: Any, path: Path) -> Heard:
    segments = list(model.transcribe(str(path), beam_size=1, word_timestamps=True)[0])
    words = [(word.word, word.start, word.end) for segment in segments for word in segment.words]
    return _heard("".join(segment.text for segment in segments), words)


def _distance(expected: list[str], heard: list[str]) -> int:
    """Return the least number of words to put in, take out or replace."""
    row = list(range(len(heard) + 1))
    for count, word in enumerate(expected, 1):
        diagonal, row[0] = row[0], count
        for place, other in enumerate(heard, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (word != other))
    return row[-1]


if __name__ == "__main__":
    typer.run(recordings)
