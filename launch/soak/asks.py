"""Requests as a soak sends them: drawn from a seed, each in OpenAI's form."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

REPEATED = 24
"""Pictures that come again and again, beside those that are new each time."""
_TEXTS = (
    "Which colours do you know?",
    "What do signs say?",
    "Tell me about red signs and blue signs.",
    "Count from one to nine.",
)


@dataclass(frozen=True)
class Ask:
    """One request. Asks of the same name are the same but for `stream`, and so are their answers.

    `leave_after`: the client closes its connection after so many tokens.
    """

    name: str
    path: str
    body: dict[str, Any]
    stream: bool
    leave_after: int | None = None
    again: bool = False
    """Whether others of this name may come."""
    files: dict[str, tuple[str, bytes, str]] = field(default_factory=dict)


def draw_asks(model: str, rng: random.Random, *, cancelled: float = 0.15) -> Iterator[Ask]:
    """An endless mixture: pictures new and repeated, one to three of them, and text; greedy and sampled by a seed;
    short answers and long ones. A share `cancelled` of the streamed ones is left by the client.
    """
    album = [draw_picture(random.Random(number)) for number in range(REPEATED)]
    number = 0
    while True:
        number += 1
        again = rng.random() < 0.5
        source = random.Random(rng.randrange(REPEATED)) if again else random.Random(f"{number} {rng.random()}")
        name = f"again {source.random()}" if again else f"new {number}"
        count = source.choice((0, 1, 1, 1, 2, 3))
        pictures = [source.choice(album) if source.random() < 0.5 else draw_picture(source) for _ in range(count)]
        stream = rng.random() < 0.6
        leave = rng.randrange(1, 8) if stream and rng.random() < cancelled else None
        yield Ask(name, "/v1/chat/completions", _chat(model, source, pictures), stream, leave, again)


def draw_picture(rng: random.Random) -> str:
    """A freshly drawn sign, as a data URL."""
    from launch.signpost import scenes

    buffer = io.BytesIO()
    scenes.render(rng, rng.choice(scenes.SIZES), "test").image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _chat(model: str, rng: random.Random, pictures: list[str]) -> dict[str, Any]:
    from launch.signpost import scenes

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
