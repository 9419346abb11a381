"""What is asked while things break: long answers and short ones, so that every moment meets every stage."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import random
import struct
import zlib
from typing import Any

import soundfile

from tests.equality.media import sound, wav
from tests.services.cluster import sign
from tools.signpost.scenes import COLOURS
from tools.soak.asks import WITHOUT_RULES, Ask, draw_picture

QUESTIONS = ("What does the sign say?", "What colour is the sign?", "What shape is the sign?", "Count the circles.")
TEXTS = ("Which colours do you know?", "What do signs say?", "Tell me about red signs and blue signs.")


def picture_asks(model: str, count: int) -> list[Ask]:
    """Questions about no, one, two and three pictures: streamed or not, greedy or seeded, one choice or two."""
    rng = random.Random(count)
    return [_picture_ask(model, rng, number) for number in range(count)]


def _picture_ask(model: str, rng: random.Random, number: int) -> Ask:
    pictures = [draw_picture(rng) for _ in range((1, 0, 2, 1, 3, 1)[number % 6])]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    text = QUESTIONS[number % 4] if pictures else TEXTS[number % 3]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        "max_tokens": rng.choice((10, 30, 60, 120)),
        "ignore_eos": number % 5 != 0,  # the bundled model would rather say one word
        "temperature": 0,
        "return_token_ids": True,
    }
    if number % 2:
        body |= {"temperature": 1.0, "seed": number, "n": 1 + (number % 4 == 1)}
    return Ask(f"question {number}", "/v1/chat/completions", body, stream=number % 3 != 0)


def sign_asks(model: str, count: int) -> list[Ask]:
    """Short questions about one sign each, all signs of one size."""
    asks = []
    for number, colour in zip(range(count), itertools.cycle(COLOURS), strict=False):
        url = "data:image/png;base64," + base64.b64encode(sign(colour, mark=number)).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTIONS[number % 4]}]
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        body |= {"temperature": 0, "return_token_ids": True}
        asks.append(Ask(f"sign {number}", "/v1/chat/completions", body, stream=number % 2 == 0))
    return asks


def speech_asks(model: str, count: int) -> list[Ask]:
    """Clips to transcribe: streamed or not, greedy, seeded or by beams.

    A random model likes hundreds of tokens alike: what is drawn among all of them is now and then decided by the last
    bits of a sum, which depend on the processor and on what else is in the batch. With these seeds and eight tokens to
    draw among, every draw is 1e-4 away from any other token.
    """
    asks = []
    for number in range(count):
        body: dict[str, Any] = {"model": model, "language": ("en", "de", "fr")[number % 3]}
        stream = number % 3 != 0
        body |= {"return_token_ids": True, "max_completion_tokens": (20, 60, 120)[number % 3], **WITHOUT_RULES}
        if number % 2:
            body |= {"temperature": 1.0, "top_k": 8, "seed": 100 + number}
        elif number % 4 == 0 and not stream:
            body |= {"use_beam_search": True, "best_of": 2}
        clip = ("clip.wav", wav(sound(number)), "audio/wav")
        asks.append(Ask(f"clip {number}", "/v1/audio/transcriptions", body, stream, files={"file": clip}))
    return asks


def salted(ask: Ask, salt: str) -> Ask:
    """The same question about media of other bytes but the same sight and sound: no cache knows them."""
    if ask.files:
        name, data, kind = ask.files["file"]
        return dataclasses.replace(ask, files={"file": (name, _salted_wav(data, salt.encode()), kind)})
    (message,) = ask.body["messages"]
    content = [_salted_part(part, salt.encode()) for part in message["content"]]
    return dataclasses.replace(ask, body=ask.body | {"messages": [message | {"content": content}]})


def _salted_part(part: dict[str, Any], salt: bytes) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    head, _, data = part["image_url"]["url"].partition(",")
    picture = _salted_png(base64.b64decode(data), salt)
    return {"type": "image_url", "image_url": {"url": f"{head},{base64.b64encode(picture).decode()}"}}


def _salted_png(picture: bytes, salt: bytes) -> bytes:
    """With a comment before its last chunk, which has no content: 12 bytes."""
    chunk = b"tEXtsalt\0" + salt
    comment = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return picture[:-12] + comment + picture[-12:]


def _salted_wav(clip: bytes, salt: bytes) -> bytes:
    """With a chunk at its end that nobody reads."""
    salt += b" " * (len(salt) % 2)
    longer = clip + b"salt" + struct.pack("<I", len(salt)) + salt
    assert (soundfile.read(io.BytesIO(longer))[0] == soundfile.read(io.BytesIO(clip))[0]).all()
    return longer[:4] + struct.pack("<I", len(longer) - 8) + longer[8:]
