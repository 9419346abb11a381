"""Requests as a soak sends them: drawn from a seed, each in OpenAI's form."""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tools.bench import workloads
from tools.numerals.words import LANGUAGES, spell

REPEATED = 24  # images and clips that come again and again, beside new ones
LEFT = 0.15  # share of streamed answers whose clients leave before the end
_CLIP_S = (1.0, 3.0, 8.0, 8.0, 20.0, 35.0)  # the last exceeds Whisper's window of 30 s
_TEXTS = (
    "Which colours do you know?",
    "What do signs say?",
    "Tell me about red signs and blue signs.",
    "Count from one to nine.",
)

WITHOUT_RULES = {"log_prob_threshold": -100, "no_speech_threshold": 1, "compression_ratio_threshold": 1e6}
"""Of Whisper: what random weights say would be read again, at other temperatures."""


@dataclass(frozen=True)
class Ask:
    """One request. Asks of the same name are the same but for `stream`, and so are their answers.

    `leave_after`: the client closes its connection after so many events of the stream.
    """

    name: str
    path: str
    body: dict[str, Any]
    stream: bool
    leave_after: int | None = None
    again: bool = False
    """Whether others of this name may come."""
    files: dict[str, tuple[str, bytes, str]] = field(default_factory=dict)


def draw_chats(model: str, rng: random.Random) -> Iterator[Ask]:
    """An endless mixture: pictures new and repeated, one to three of them, and text; greedy and sampled by a seed;
    short answers and long ones.
    """
    album = [draw_picture(random.Random(number)) for number in range(REPEATED)]
    for number in itertools.count():
        again, source = _draw_source(rng, number)
        name = f"chat {source.random()}"
        count = source.choice((0, 1, 1, 1, 2, 3))
        pictures = [source.choice(album) if source.random() < 0.5 else draw_picture(source) for _ in range(count)]
        stream, leave = _draw_manner(rng)
        yield Ask(name, "/v1/chat/completions", _chat(model, source, pictures), stream, leave, again)


def draw_transcriptions(model: str, rng: random.Random) -> Iterator[Ask]:
    """Endless clips, new and repeated, of a second to longer than a window; greedy, by beams and sampled by a seed.

    Streamed transcripts tell no tokens, so that they have names of their own.
    """
    for number in itertools.count():
        again, source = _draw_source(rng, number)
        name = f"clip {source.random()}"
        clip = ("clip.wav", draw_clip(source), "audio/wav")
        stream, leave = _draw_manner(rng)
        body = _transcription(model, source, beams=not stream)
        name = f"{name} streamed" if stream else name
        yield Ask(name, "/v1/audio/transcriptions", body, stream, leave, again, files={"file": clip})


def draw_numbers(model: str, rng: random.Random) -> Iterator[Ask]:
    """Endless numbers, new and repeated, in digits and in words of three languages; greedy and sampled by a seed."""
    for number in itertools.count():
        again, source = _draw_source(rng, number)
        name, language, value = f"number {source.random()}", source.choice(LANGUAGES), source.randrange(10**6)
        prompt = source.choice((f"{language}: {value}", spell(language, value, source)))
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 48, "return_token_ids": True}
        body |= source.choice(({"temperature": 0}, {"temperature": 1.0, "seed": value, "n": 2}))
        stream, leave = _draw_manner(rng)
        yield Ask(name, "/v1/completions", body, stream, leave, again)


DRAWS: Final[dict[str, Callable[[str, random.Random], Iterator[Ask]]]] = {
    "pictures": draw_chats,
    "audio": draw_transcriptions,
    "text": draw_numbers,
}
"""Endless requests of each kind, for a model that the API calls by this name."""


def _draw_source(rng: random.Random, number: int) -> tuple[bool, random.Random]:
    """Whether the next ask is one of those that come again, and what to draw it from."""
    again = rng.random() < 0.5
    return again, random.Random(rng.randrange(REPEATED)) if again else random.Random(f"{number} {rng.random()}")


def _draw_manner(rng: random.Random) -> tuple[bool, int | None]:
    """Whether an answer is streamed, and after how many events its client leaves."""
    stream = rng.random() < 0.6
    return stream, rng.randrange(1, 8) if stream and rng.random() < LEFT else None


def draw_picture(rng: random.Random) -> str:
    """Return a freshly drawn sign, as a data URL."""
    return "data:image/png;base64," + base64.b64encode(workloads.draw_picture(rng)).decode()


def draw_clip(rng: random.Random) -> bytes:
    """A WAV file of a few tones in noise: nothing a person would understand, but no two alike."""
    import numpy as np
    import soundfile

    times = np.arange(int(workloads.SAMPLE_RATE * rng.choice(_CLIP_S))) / workloads.SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 2000) * times) for _ in range(4))
    noise = np.random.default_rng(rng.randrange(2**31)).standard_normal(len(times))
    buffer = io.BytesIO()
    soundfile.write(buffer, 0.1 * tones + 0.02 * noise, workloads.SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def _transcription(model: str, rng: random.Random, *, beams: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "language": "en", "return_token_ids": True}
    body |= {"max_completion_tokens": rng.choice((10, 40, 80)), **WITHOUT_RULES}
    kind = rng.choice(("greedy", "seeded", "beams"))
    if kind == "seeded":  # among few: among hundreds alike the last bits of a sum decide, which a batch changes
        return body | {"temperature": 1.0, "top_k": 8, "seed": rng.randrange(2**31)}
    return body | ({"use_beam_search": True, "best_of": 2} if beams and kind == "beams" else {})


def _chat(model: str, rng: random.Random, pictures: list[str]) -> dict[str, Any]:
    from tools.signpost import scenes

    question = rng.choice(scenes.QUESTIONS[rng.choice(scenes.KINDS)]) if pictures else rng.choice(_TEXTS)
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": question}]}],
        "max_tokens": rng.choice((8, 16, 32, 64, 200)),
        "ignore_eos": rng.random() < 0.5,  # the bundled model would rather say one word
        "temperature": 0,
        "return_token_ids": True,
    }
    if rng.random() < 0.5:
        body |= {"temperature": 1.0, "seed": rng.randrange(2**31), "n": rng.choice((1, 1, 2))}
    return body
